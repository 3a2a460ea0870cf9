"""Verification of weights: in each step the ranks compare a part of their weights, within the control flags.

The weights are divided into parts, and each step compares the next part. Each rank sends the fingerprint of the part
(:mod:`hvd_ckpt.utils.fingerprint`), cut into digits that float32 adds exactly, so no additional message is needed: 1, and *d* and
*d* x *d* for each digit *d*. By the Cauchy-Schwarz inequality, *n* ranks have sent the same digit if and only if *n* times the sum
of the squares is the square of the sum. A rank that is absent (``join()``), or does not take part, counts as 0 everywhere.

A fingerprint is computed while the last gradients of a step are in flight, from the weights of that step. It is sent with the
flags of the next step, so it only uses time that would be spent waiting.

After the flags all ranks have the same information. If there is a difference, they exchange the fingerprints of all compared
parameters, in one allreduce in which absent ranks also take part. This table decides. It names the parameter and the ranks, or
shows that weights have become equal since. It may also show that the ranks were at different parts, which are then made equal.

At stages 1 and 2 each rank updates a part of the weights and gives it to the others, which mixes what a rank alone has written
into the weights of all before they are compared. There a step also compares one element of each parameter
(:attr:`WeightVerification.sample`), and a difference that was found once is an error.

The options of the optimizer (:mod:`.stepping`) are part of each fingerprint, also where no weights are whole (stage 3).

Only parameters that have been reduced are compared, since ranks that average a gradient need the same weight for it. A parameter
that is not reduced (frozen, or never used) may differ. The first step compares nothing, so weights may be broadcast after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.processes.grid import host_name
from hvd_ckpt.reduction.buckets import TensorSpec
from hvd_ckpt.reduction.stepping import SteppingOptions, described, digest
from hvd_ckpt.utils.fingerprint import fingerprint

# A part is small enough that its cost is not noticed, whatever the model: a step reads all weights several times.
PART_BYTES, PART_TENSORS = 256 << 10, 32  # or 1 / PARTS of all, where that is more
PARTS = 256
JOINED_BYTES = 64 << 10  # of small parameters, whose fingerprint is taken at once
MAX_RANKS = 16_000  # the sums of squares stay below 2**22, which a scale may round twice
ROUNDED_RANKS = 128  # where what each rank brings is rounded
# Odd, so that multiplication modulo 2**64 is one to one: a difference in one fingerprint outlasts those that are folded in later.
_FOLD = 0x5DEECE66D
_HOST_WORDS = 8
_OWN = 6  # columns of numbers of a rank's own
_FACTS = _OWN + _HOST_WORDS  # columns of a rank before its fingerprints


class _Verification:
    """The arguments of the last call of :func:`verify_weights`."""

    enabled = os.environ.get("HVD_CKPT_VERIFY_WEIGHTS", "1") != "0"
    ignored: Any = WeakTensorKeyDictionary()


def verifies_weights() -> bool:
    """Whether optimizers verify weights, see :func:`verify_weights`."""
    return _Verification.enabled


def verify_weights(enabled: bool = True, *, ignore: Iterable[torch.Tensor] = ()) -> None:
    """Sets whether optimizers verify weights, as :func:`hvd_ckpt.verify` has it. A further call replaces the setting."""
    ignored = WeakTensorKeyDictionary()
    for parameter in ignore:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"verify(ignore=) takes parameters, not {type(parameter).__name__}; pass a list of them, such as "
                f"list(module.parameters())"
            )
        ignored[parameter] = True
    _Verification.enabled, _Verification.ignored = enabled, ignored


class Sums:
    """Flags that are added up over the ranks: 1, and of each hexadecimal digit the digit and its square."""

    # 1, 16 digits of 4 bits, and their squares.
    SIZE = 33

    @staticmethod
    def encode(value: torch.Tensor | None) -> torch.Tensor:
        """Of a fingerprint, float32 [SIZE]; zeros for None."""
        if value is None:
            return torch.zeros(Sums.SIZE, dtype=torch.float32)
        digits = ((value >> torch.arange(0, 64, 4, device=value.device)) & 15).float()
        return torch.cat([torch.ones(1, dtype=torch.float32, device=value.device), digits, digits * digits])

    @staticmethod
    def equal(values: Sequence[float], scale: float) -> bool:
        """Whether all ranks that brought a fingerprint brought the same, given the sums times ``scale``."""
        ranks, *sums = (round(value / scale) for value in values)
        return all(ranks * squares == digits**2 for digits, squares in zip(sums[:16], sums[16:]))


class _Range(NamedTuple):
    """Elements of a parameter, in memory order."""

    parameter: int
    start: int
    stop: int


class _Prepared(NamedTuple):
    """The flags of a part, and the step whose weights they are of; and the parameters that were sampled, with their bits.

    ``value`` is the fingerprint without the options, which ``flags`` have as they were then.
    """

    turn: int
    step: int
    value: torch.Tensor
    options: Sequence[int]
    flags: torch.Tensor
    sampled: Sequence[int]
    sample: torch.Tensor | None


class WeightVerification:
    """The comparison of one optimizer's weights. All ranks call its methods in the same order.

    Attributes:
        sample: where the ranks take over parts of each other's weights in each step (stages 1 and 2), so that what one rank has
            written is gone or everywhere before its part's turn comes: gives for a number and some parameters the bits of one
            element of each, int64 [parameters]. They are compared in each step.
        compared: the parameters that are compared, by index.
        turn: the part that is compared next.
        written: parameters that this rank has written outside of steps since the last synchronization, which compares them in
            any case, where an optimizer says so.
        alone: this rank has stepped by itself, and is not compared any more.
        stepping: the options of the optimizer, which are compared in each step.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        process_set: Any,
    ) -> None:
        self._names, self._parameters, self._process_set = names, parameters, process_set
        self.sample: Callable[[int, Sequence[torch.Tensor]], torch.Tensor] | None = None
        self.compared: list[int] = []
        self._parts: list[list[_Range]] = [[]]
        self.turn, self.alone = 0, False
        self.written: list[torch.Tensor] = []
        self.stepping: SteppingOptions | None = None
        self._options: Sequence[int] = ()  # that were sent
        self._prepared: _Prepared | None = None
        self._sent: _Prepared | None = None
        # Without a fingerprint: in the first step, and after the weights that are compared have changed.
        self._sends_options = True
        self._steps = 0  # synchronizations so far
        self._equal_in: dict[int, int] = {}  # of each part, the last step in which it was equal
        self._ignored: set[int] = set()  # parameters that another rank ignores

    def compare(self, indices: Iterable[int]) -> None:
        """Compares these parameters from now on, the same on every rank."""
        chosen = sorted(indices)
        if chosen != self.compared:
            self.compared = chosen
            self._parts = _divide([self._parameters[index] for index in chosen], chosen) or [[]]
            self._equal_in.clear()
            self._sends_options = self._prepared is not None
            self._prepared = self._sent = None

    def restart(self) -> None:
        """Forgets everything. Call it on every rank."""
        self.compare(())
        self.turn, self._steps, self.alone, self._sends_options = 0, 0, False, True
        self._ignored.clear()

    # ---------------------------------------------------------------------------------- what a rank brings

    def encode(self) -> torch.Tensor:
        """This rank's flags of a synchronization, float32 [Sums.SIZE], on the device of the weights."""
        self._sent, self._prepared = self._prepared, None
        # A state was loaded, say, so that it is another part's turn: the other ranks would compare this one with theirs.
        if self._sent is not None and (self._sent.turn != self.turn or not self._takes_part):
            self._sent = None
        written, self.written = set(map(id, self.written)), []
        self._options = self._stepping_options()
        if self.stepping is not None:
            self.stepping.limits = []
        sends_options, self._sends_options = self._sends_options and self._takes_part, False
        if self._sent is None:
            if sends_options:
                return _flags(torch.zeros((), dtype=torch.int64), self._options)
            self._options = ()
            return Sums.encode(None)
        value = self._sent.value
        for index in self.compared if written else ():
            if id(self._parameters[index]) in written and not self._ignores(index):
                value = value * _FOLD + fingerprint(self._parameters[index]).to(value.device) + index
        is_prepared = value is self._sent.value and self._options == self._sent.options
        return self._sent.flags if is_prepared else _flags(value, self._options)

    def _stepping_options(self) -> Sequence[int]:
        return () if self.stepping is None else self.stepping.values()

    def prepare(self, exact: bool = True) -> None:
        """Takes the fingerprint that the next synchronization sends, once this one has sent its own; ``exact`` if flags are not
        rounded.
        """
        self._steps += 1
        most = MAX_RANKS if exact else ROUNDED_RANKS
        if self._takes_part and 1 < self._process_set.size() <= most:
            turn = (self.turn + 1) % len(self._parts)
            value, sampled, sample = self._of_part(turn), [], None
            if self.sample is not None and self.compared:
                sampled = [index for index in self.compared if not self._ignores(index)]
                sample = self.sample(self._steps, [self._parameters[index] for index in sampled])
                value = value * _FOLD + fingerprint(sample).to(value.device)
            options = self._stepping_options()
            flags = _flags(value, options)
            self._prepared = _Prepared(turn, self._steps, value, options, flags, sampled, sample)

    @property
    def _takes_part(self) -> bool:
        return _Verification.enabled and not self.alone

    @torch.no_grad()
    def _of_part(self, number: int) -> torch.Tensor:
        """The fingerprint of a part, and of its number."""
        total: torch.Tensor | None = None
        for pieces in self._alike(self._parts[number]):
            value = fingerprint(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
            total = value if total is None else total.to(value.device) * _FOLD + value
        # With the number, ranks at different parts show as different, even where these parts have equal bits.
        return torch.tensor(number) if total is None else total + number

    def _alike(self, part: Sequence[_Range]) -> Iterator[list[torch.Tensor]]:
        """The elements of a part, small ones of one type together."""
        pieces: list[torch.Tensor] = []
        size = 0
        for index, start, stop in part:
            if self._ignores(index):
                continue
            parameter = self._parameters[index]
            contiguous = parameter.is_contiguous()
            piece = parameter.view(-1) if contiguous else TensorSpec.of(parameter).flatten(parameter)
            if stop - start < piece.numel():
                piece = piece[start:stop]
            alike = not pieces or (piece.dtype is pieces[0].dtype and piece.device == pieces[0].device)
            if pieces and not (alike and size + piece.nbytes <= JOINED_BYTES):
                yield pieces
                pieces, size = [], 0
            pieces.append(piece)
            size += piece.nbytes
        if pieces:
            yield pieces

    def _ignores(self, index: int) -> bool:
        ignored = _Verification.ignored
        return index in self._ignored or (bool(ignored) and self._parameters[index] in ignored)

    # ---------------------------------------------------------------------------------- what the ranks find

    def check(self, values: Sequence[float], scale: float, total: Callable[[torch.Tensor, str], Any]) -> None:
        """Raises, the same on every rank, if the part that was brought last is not the same on all ranks. Collective.

        Args:
            values: the reduced flags, these at the end.
            scale: what the sums have been multiplied by.
            total: adds up a tensor over the ranks, under a name.

        Raises:
            WeightsDiffer: it names the first parameter and the ranks.
        """
        part = self.turn % len(self._parts)
        self.turn = (part + 1) % len(self._parts)
        if not Sums.equal(values[-Sums.SIZE :], scale):
            self._compare_all(part, total)
        elif self._sent is not None:
            self._equal_in[part] = self._sent.step

    def _compare_all(self, part: int, total: Callable[[torch.Tensor, str], Any]) -> None:
        """Exchanges the fingerprints of all compared parameters; raises if one differs, that of the part first."""
        from hvd_ckpt.reduction.consistency import TableEntry, WeightsDiffer, difference

        ranks, own = ranks_of(self._process_set), self._process_set.rank()
        # A row for each rank, which this rank fills for itself; the sum over the ranks is the whole table:
        #
        #   2 if it compares, else 1 | turn | steps | last equal step | digest and number of options | host name x 8
        #   | fingerprint of each parameter | its sample
        #
        # A row of zeros is a rank that has joined. A fingerprint or sample of 0 is a parameter that the rank does not compare.
        samples: dict[int, int] = {}
        if self._sent is not None and self._sent.sample is not None:
            samples = dict(zip(self._sent.sampled, (self._sent.sample * _FOLD + 1).tolist()))
        table = torch.zeros(len(ranks), _FACTS + 2 * len(self.compared), dtype=torch.int64)
        host = host_name().encode()[: 8 * _HOST_WORDS].ljust(8 * _HOST_WORDS, b"\0")
        facts = [2 if self._takes_part else 1, self.turn, self._steps, self._equal_in.get(part, 0)]
        facts += [digest(self._options) if self._options else 0, len(self._options)]
        table[own, :_OWN] = torch.tensor(facts)
        table[own, _OWN:_FACTS] = torch.frombuffer(bytearray(host), dtype=torch.int64)
        for column, index in enumerate(self.compared if self._takes_part else (), _FACTS):
            if not self._ignores(index):
                table[own, column] = int(fingerprint(self._parameters[index])) or 1
                table[own, column + len(self.compared)] = samples.get(index, 0)
        rows = total(table, "weights")
        present = [row for row in rows if row[0]]
        # Ranks at different parts are level again from here on. If nothing differs in the table, that was all.
        self.turn = max(row[1] for row in present)
        level = all(row[1] == self.turn for row in present)
        comparing = {rank: row for rank, row in zip(ranks, rows) if row[0] == 2}
        columns = [
            (index, column)
            for column, index in enumerate(self.compared, _FACTS)
            if all(row[column] for row in comparing.values())
        ]
        # What one rank ignores all ignore from here on. Else the ranks would take the fingerprint of a part
        # over different parameters, and exchange this table in every step.
        self._ignored.update(set(self.compared).difference(index for index, _ in columns))
        turns = {entry.parameter for entry in self._parts[part]} if level else set()
        columns.sort(key=lambda pair: pair[0] not in turns)
        # Weights that differ now, and else those that differed when samples were taken.
        sampled = [(index, column + len(self.compared)) for index, column in columns]
        different, columns = next(
            (
                (index, table)
                for table in (columns, sampled)
                for index, column in table
                if len({row[column] for row in comparing.values()} - {0}) > 1
            ),
            (None, columns),
        )
        first = own == next(position for position, row in enumerate(rows) if row[0])
        if different is None:
            self._compare_options(comparing, ranks, first, total)
            return
        since = f" in step {max(row[2] for row in present)} since this optimizer was made"
        if different in turns:
            before = max(row[3] for row in comparing.values())
            since += f" (equal in step {before})" if before else " (not compared before)"
        hosts = [_text(row[_OWN:_FACTS]) for row in comparing.values()]

        def entry(index: int, value: int) -> TableEntry:
            parameter = self._parameters[index]
            dtype = str(parameter.dtype).removeprefix("torch.")
            return TableEntry(self._names[index], tuple(parameter.shape), dtype, value)

        tables = [[entry(index, row[column]) for index, column in columns] for row in comparing.values()]
        error = difference(list(comparing), hosts, tables, since)
        if isinstance(error, WeightsDiffer):
            error.first = first
        raise error

    def _compare_options(
        self,
        comparing: dict[int, Sequence[int]],
        ranks: Sequence[int],
        first: bool,
        total: Callable[[torch.Tensor, str], Any],
    ) -> None:
        """Exchanges the options of the ranks, if they have sent different ones, and raises an error that names the first."""
        from hvd_ckpt.reduction.consistency import WeightsDiffer

        there = {rank: row for rank, row in comparing.items() if row[4]}
        if len({row[4] for row in there.values()}) < 2:
            return
        numbers = [row[5] for row in there.values()]
        what, values = "the number of options in param_groups", [str(number) for number in numbers]
        if len(set(numbers)) == 1:
            table = torch.zeros(len(ranks), numbers[0], dtype=torch.int64)
            if self._options:
                table[self._process_set.rank()] = torch.tensor(self._options)
            rows = dict(zip(ranks, total(table, "options")))
            differ = (len({rows[rank][place] for rank in there}) > 1 for place in range(numbers[0]))
            place = next((place for place, differs in enumerate(differ) if differs), 0)
            what = self.stepping.name(place) if self.stepping is not None else "an option"
            values = [described(rows[rank][place]) for rank in there]
        usual = max(values, key=values.count)
        apart = next((rank for rank, value in zip(there, values) if value != usual), None)
        said = "" if apart is None else f": {usual}, and {dict(zip(there, values))[apart]} on rank {apart}"
        error = WeightsDiffer(
            f"{what} differs between ranks{said}; ranks would step in different ways: set options of the optimizer alike on every "
            "rank, from values that all have, such as the mean of their losses"
        )
        error.first = first
        raise error


def _flags(value: torch.Tensor, options: Sequence[int]) -> torch.Tensor:
    return Sums.encode(value * _FOLD + digest(options) if options else value)


def _divide(parameters: Sequence[torch.Tensor], indices: Sequence[int]) -> list[list[_Range]]:
    """Divides parameters into parts of about equal size."""
    all_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    limit = max(PART_BYTES, -(-all_bytes // PARTS) // 16 * 16)
    most = max(PART_TENSORS, -(-len(parameters) // PARTS))
    parts: list[list[_Range]] = []
    room = 0
    for index, parameter in zip(indices, parameters):
        start, size = 0, parameter.element_size()
        while start < parameter.numel():
            if room < size or len(parts[-1]) == most:
                parts.append([])
                room = limit
            stop = min(parameter.numel(), start + room // size)
            parts[-1].append(_Range(index, start, stop))
            room -= (stop - start) * size
            start = stop
    return parts


def _text(words: Sequence[int]) -> str:
    packed = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    return packed.rstrip(b"\0").decode(errors="replace")
