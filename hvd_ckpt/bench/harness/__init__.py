"""The harness under every benchmark and the comparison: jobs of ranks, statistics, reports, command options, workloads.

A benchmark is a command, a worker that runs on every rank, and a function that turns results into a table:

    jobs        ``RankJob`` (a dataclass that the ranks are given), ``run_job`` (launcher side), ``run_rank`` (rank side),
                ``join_torch`` for engines on ``torch.distributed``
    stats       ``Quartiles``, ``alternating`` rounds (A B C, C B A, ...), ``ratios`` within a round
    report      ``Table`` and ``Report``: terminal, ``report.md``, ``results.json``, pictures
    options     ``bench_command``: the options, the progress line and the ending that all benchmark commands share
    workloads   GPT, BERT, DenseNet, LSTM, transformer: model, batch and loss

A command and its worker, whole::

    @dataclass(frozen=True)
    class Job(RankJob):                       # fields: the settings of the ranks
        worker = "hvd_ckpt.bench.thing"       # the module that the ranks run
        steps: int

    @dataclass
    class Result:                             # what one rank measured
        seconds: list[float]

    @bench_command("thing")
    @click.option("--steps", default=5)
    @job_options                              # --controller, --timeout
    def thing(run: BenchRun, steps: int, controller: str, timeout: float) -> None:
        with run.progress(total=1) as progress:
            progress.start("two ranks")
            ranks = run_job(Job(run.jobs / "np2", 2, steps), Result, check_controller(controller), timeout)
        table = Table(("step ms",), [(f"{quartiles(slowest(rank.seconds for rank in ranks)).median:.1f}",)])
        run.finish(Report("A thing, timed", machine_facts(), [table], results=[...]), success=True)

    if __name__ == "__main__":                # on each rank; the launcher hears of an error
        run_rank(Job, measure)                # measure(job) -> Result
"""
