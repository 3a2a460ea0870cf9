"""The runner under the comparison and under every benchmark.

    settings    a frozen dataclass of settings, from which the options of a command follow
    options     ``bench_command`` and ``BenchRun``: output folder, progress, jobs and their failures, report, exit status
    jobs        ``RankJob`` (a dataclass that the ranks are given) and ``run_job``; ``rank`` is the program of each rank
    cases       ``Case`` (what was measured under one condition) and ``Column`` (a value of each case, in tables and results)
    report      ``Table`` and ``Report``: terminal, ``report.md``, ``results.json``, pictures
    stats       ``Quartiles``, ``alternating`` rounds (A B C, C B A, ...), ``ratios`` within a round
    engine      ``Engine``, the interface of all engines: those on data parallelism (``engines``), in pipeline stages (``stages``),
                and those of ``benchmarks.peers``
    workloads   GPT, BERT, DenseNet, LSTM, transformer: model, batch and loss

A benchmark, whole::

    @dataclass(frozen=True)
    class Settings(BenchSettings):
        sizes: tuple[int, ...] = ranks_setting()      # --np
        steps: int = setting("Timed steps.", 5, quick=1)
        quick: bool = quick_setting("Few steps.")

    @dataclass(frozen=True)
    class Job(RankJob):
        worker = "benchmarks.thing:measure"       # what each rank calls
        settings: Settings

    def measure(job: Job) -> dict[str, Any]: ...      # {"seconds": of each step, "bytes": sent}

    COLUMNS = [
        *conditions("np"),
        Column("step ms", lambda case: case.step, median_in_ms(".1f"), key="step_seconds"),
        figure("bytes", max, "sent MiB", in_mib()),
    ]

    @bench_command(Settings)
    def thing(run: BenchRun, settings: Settings) -> None:
        cases = [Case("thing", {"np": size}) for size in settings.sizes]
        run.make_report = lambda: run.report("A thing, timed", [table_of(COLUMNS, cases)], results_of(COLUMNS, cases))
        with run.progress(len(cases)) as progress:
            for case in cases:
                size = case.at["np"]
                case.add(progress.job(f"{size} ranks", Job(run.jobs / f"np{size}", size, settings), dict[str, Any]))
        run.finish()
"""
