"""Several hosts on one machine, for tests of jobs over hosts.

A host is a set of Linux namespaces: its own network (a virtual cable to a switch), name, processes, ``/dev/shm`` and
``/run``, with an sshd of its own; its files are this machine's. The hosts are called a, b, c, ... at 10.77.0.1 and up, know
each other by name, and root's ssh between them works without a word, by keys made for the occasion::

    with Hosts(3) as hosts:
        hosts.run("a", ["horovodrun", "-np", "2", "-H", "a:1,b:1", "python", "train.py"], timeout=100)

Nothing of it is visible outside: the namespaces have no names, the switch lives in one too, and everything ends when the
process that made it ends, however it ends (each host's first process waits for the end of its standard input). By hand, a shell
on the first of three hosts::

    python tests/helpers/hosts.py 3 bash
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PROGRAMS = ("ip", "ssh", "sshd", "ssh-keygen", "unshare", "nsenter", "mount", "bash")
NETWORK = "10.77.0"
SEARCH = os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path(), "/usr/sbin", "/sbin"])
ENVIRONMENT = {**os.environ, "PATH": SEARCH}

SWITCH = """
trap '' INT TERM HUP
echo $$
read -r _
rm -rf "$1"
"""

HOST = r"""
set -e
read -r process _ </proc/self/stat
echo "$process"
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
echo "$1" >/proc/sys/kernel/hostname
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/ssh" /etc/ssh
mount --bind "$2/passwd" /etc/passwd
read -r _
ip link set lo up
ip address add "$3/24" dev eth0
ip link set eth0 up
"$(command -v sshd)"
echo up
read -r _ || true
"""

SSHD = """\
AddressFamily inet
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/key.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
MaxStartups 100
SetEnv PATH={path}
"""

SSH = """\
Host *
  IdentityFile /etc/ssh/key
  GlobalKnownHostsFile /etc/ssh/ssh_known_hosts
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@functools.cache
def unavailable() -> str | None:
    """Why hosts cannot be made here, in a few words; None if they can."""
    if os.geteuid() != 0:
        return "hosts as network namespaces need root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: openssh-server, openssh-client, iproute2)"
    trial = "ip link add name s type bridge && ip link add name x type veth peer name y && mount -t proc proc /proc"
    command = [*_namespaces(), "bash", "-c", trial]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return f"namespaces cannot be made here: {said[-1]}"
    return None


class Hosts:
    """Some hosts, from 1 to 26, up from the start of the ``with`` block to its end.

    Attributes:
        names: "a", "b", ...
        addresses: each host's address by its name.

    Raises:
        RuntimeError: they cannot be made here (:func:`unavailable` says why beforehand), or one did not come up.
    """

    def __init__(self, count: int) -> None:
        self.names = tuple(string.ascii_lowercase[:count])
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(self.names, 1)}
        # The first one of each host, the switch's, and those of slow cables.
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._roots: dict[str, int] = {}  # their process ids, as seen from outside
        self._own: dict[str, set[int]] = {}  # the processes that a host has when nothing runs on it
        self._jobs: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        if (reason := unavailable()) is not None:
            raise RuntimeError(f"{reason}.")
        self._folder = Path(tempfile.mkdtemp(prefix="hvd-ckpt-hosts-"))
        try:
            self._write_files()
            self._plug_in()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that runs on the hosts, and the hosts."""
        for process in self._processes.values():
            with contextlib.suppress(BrokenPipeError):
                process.communicate(timeout=30)
        self._processes.clear()
        self._end_jobs()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_jobs(self) -> None:
        for job in self._jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        self._jobs.clear()

    def run(
        self, name: str, command: Sequence[str], *, timeout: float, environment: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host and waits for it, as :meth:`start`; past ``timeout`` seconds, all on the hosts is killed.

        Raises:
            subprocess.TimeoutExpired: with the output so far.
        """
        job = self.start(name, command, environment=environment)
        try:
            output, errors = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.clear()
            output, errors = job.communicate()
            raise subprocess.TimeoutExpired(job.args, timeout, output, errors) from None
        return subprocess.CompletedProcess(job.args, job.returncode, output, errors)

    def start(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str] = {}
    ) -> subprocess.Popen[str]:
        """Starts a command on a host, its output (text) in pipes. Signals go to :meth:`processes`, not to this one.

        Args:
            environment: variables beside those of this process.
        """
        whole = {**self.environment(), **environment}
        self._jobs.append(_started(self.command(name, command), whole, stdin=subprocess.DEVNULL))
        return self._jobs[-1]

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host, from outside."""
        return [*self._inside(name, "--all"), "env", "-C", str(Path.cwd()), *command]

    def environment(self) -> dict[str, str]:
        """The environment variables of what runs on a host."""
        return {**os.environ, "PATH": SEARCH, "HOME": str(self._folder / "home")}

    def processes(self, name: str) -> dict[int, str]:
        """What runs on a host beside its sshd: command lines by process id (as seen, and killed, from outside)."""
        return {process: line for process, line in self._all(name) if process not in self._own[name]}

    def clear(self) -> None:
        """Kills everything that runs on the hosts; the hosts stay."""
        for name in self.names:
            while running := self.processes(name):
                for process in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                time.sleep(0.01)
        self._end_jobs()

    def limit(self, name: str, rate: str) -> None:
        """Lets the host send at most so many Mbit/s."""
        # A burst that holds the largest frame: smaller ones are cut into packets, which costs the processor more than all else.
        shape = f"tc qdisc replace dev eth0 root tbf rate {rate}mbit burst 256kb limit 50mb"
        self.run(name, shape.split(), timeout=10).check_returncode()

    def cut(self, name: str) -> None:
        """Pulls the host's cable: nothing comes in or goes out, and nobody is told."""
        self._on_switch(f"link set to-{name} down")

    def mend(self, name: str) -> None:
        """Plugs the cable in again, and ends its slowness."""
        self._on_switch(f"link set to-{name} up")
        if (late := self._processes.pop(f"late-{name}", None)) is not None:
            late.communicate(timeout=30)
            self._on_switch(f"link delete late-{name}", f"link set to-{name} master switch")

    def slow(self, name: str, milliseconds: float) -> None:
        """Lets each frame wait that long on the host's cable, in both directions, until :meth:`mend`."""
        self._on_switch(
            f"link set to-{name} nomaster",
            f"link add late-{name} type veth peer name wire-{name}",
            f"link set late-{name} up",
            f"link set wire-{name} master switch up",
        )
        script = str(Path(__file__).with_name("late_frames.py"))
        words = [sys.executable, script, str(milliseconds), f"to-{name}", f"late-{name}"]
        self._start_first(f"late-{name}", [*self._inside("switch", "--net"), *words])
        self._answer(f"late-{name}")

    def _write_files(self) -> None:
        ssh = self._folder / "ssh"
        ssh.mkdir()
        for file in ("key", "host_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "throw-away", "-f", str(ssh / file)]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        known = ",".join([*self.names, *self.addresses.values()])
        (ssh / "ssh_known_hosts").write_text(f"{known} {(ssh / 'host_key.pub').read_text()}")
        (ssh / "ssh_config").write_text(SSH)
        (ssh / "sshd_config").write_text(SSHD.format(path=SEARCH))
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses.items())]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        # A root with an empty home and a plain shell: what this machine's one sets up at a login is no business of tests.
        (self._folder / "home").mkdir()
        users = Path("/etc/passwd").read_text().splitlines()
        users = [line for line in users if not line.startswith("root:")]
        lines = [f"root:x:0:0:root:{self._folder / 'home'}:/bin/sh", *users]
        (self._folder / "passwd").write_text("\n".join(lines) + "\n")

    def _plug_in(self) -> None:
        self._start_first("switch", ["unshare", "--net", "bash", "-c", SWITCH, "switch", str(self._folder)])
        for name in self.names:
            arguments = [name, str(self._folder), self.addresses[name]]
            self._start_first(name, [*_namespaces(), "bash", "-c", HOST, "host", *arguments])
        lines = ["link add name switch type bridge forward_delay 0", "link set switch up"]
        for name in ("switch", *self.names):
            self._roots[name] = int(self._answer(name))
            if name != "switch":
                lines.append(f"link add name to-{name} type veth peer name eth0 netns {self._roots[name]}")
                lines.append(f"link set to-{name} master switch up")
        self._on_switch(*lines)
        for name in self.names:
            stdin = self._processes[name].stdin
            assert stdin is not None
            stdin.write("\n")
            stdin.flush()
        for name in self.names:
            self._answer(name)
            self._own[name] = {process for process, _ in self._all(name)}

    def _start_first(self, name: str, command: list[str]) -> None:
        self._processes[name] = _started(command, ENVIRONMENT, cwd="/")

    def _answer(self, name: str) -> str:
        """The next line that a first process says."""
        process = self._processes[name]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            said = process.communicate()[1].strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"{name} did not come up: {said[-1]}.")
        return line

    def _inside(self, name: str, *namespaces: str) -> list[str]:
        return ["nsenter", "--target", str(self._roots[name]), *namespaces, "--"]

    def _on_switch(self, *lines: str) -> None:
        command = [*self._inside("switch", "--net"), "ip", "-batch", "-"]
        text = "".join(f"{line}\n" for line in lines)
        subprocess.run(command, input=text, text=True, check=True, env=ENVIRONMENT)

    def _all(self, name: str) -> Iterator[tuple[int, str]]:
        """Process id and command line of everything alive on a host."""
        namespace = os.readlink(f"/proc/{self._roots[name]}/ns/pid")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns" / "pid") == namespace:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    if words != [b""]:  # as of one that has ended and was not waited for yet
                        yield int(folder.name), b" ".join(words).decode(errors="replace").strip()


def _started(
    command: list[str], environment: dict[str, str], stdin: int = subprocess.PIPE, cwd: str | None = None
) -> subprocess.Popen[str]:
    pipe, own = subprocess.PIPE, {"env": environment, "cwd": cwd, "start_new_session": True}
    return subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, text=True, **own)


def _namespaces() -> list[str]:
    kinds = ["--net", "--uts", "--mount", "--pid", "--ipc"]
    return ["unshare", *kinds, "--propagation", "private", "--fork", "--kill-child"]


def main(count: str, *command: str) -> int:
    """Runs a command on the first of some hosts, which end with it; after ``--link MBIT MS`` on slow links."""
    if (reason := unavailable()) is not None:
        sys.exit(f"error: {reason}.")
    with Hosts(int(count)) as hosts:
        if command[0] == "--link":
            _, rate, delay, *command = command
            for name in hosts.names:
                if float(delay):
                    hosts.slow(name, float(delay) / 2)  # from host to host a frame passes two cables
                hosts.limit(name, rate)
        return subprocess.call(hosts.command("a", command), env=hosts.environment())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
