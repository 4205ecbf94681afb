"""Jobs of the GPU benchmark: what each measures, how long it takes, and which of them are worth
their time now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b

from benchmarks import gpu_kernels, gpu_parity, gpu_product, gpu_rivals, gpu_steps
from benchmarks.gpu_bench import ROOT, Bench, K, Row
from benchmarks.gpu_rivals import RivalCase
from benchmarks.gpu_steps import Rounds, StepCase

KERNEL_SOURCES = (
    "models/kernel*.py",
    "models/score_blocks.py",
    "models/attention_op.py",
    "benchmarks/gpu_kernels.py",
)
RING_SOURCES = (*KERNEL_SOURCES, "parallelisms/context/*.py")
STEP_SOURCES = (
    *("models/*.py", "parallelisms/**/*.py", "benchmarks/gpu_steps.py"),
    *(f"trainer/{room}/*.py" for room in ("config", "data", "hardware", "run", "step")),
)
RUN_SOURCES = (
    *STEP_SOURCES,
    "trainer/checkpoint/*.py",
    "trainer/launch/*.py",
    "benchmarks/gpu_product.py",
)
MESH_SOURCES = (*STEP_SOURCES, "trainer/selfcheck/*.py", "benchmarks/gpu_parity.py")


@dataclass(frozen=True)
class Job:
    name: str
    kind: str
    """The first call of a day touches every kind once."""
    measure: Callable[[Bench], object]
    seconds: float
    """Estimated from the rows of an H200, with what the job needs before it measures."""
    gib: float = 10
    """Device memory at its peak."""
    sources: tuple[str, ...] = STEP_SOURCES
    """Patterns of the files that its rows depend on."""
    alone: bool = False
    """A timing: nothing else may run on the device."""
    library: str = ""
    """Another library that it needs."""
    compilation: Callable[[Bench], object] | None = None
    """Fills the cache of generated code, beside other jobs."""

    @property
    def limit(self) -> float:
        """Seconds after which the job counts as hung."""
        return 60 + 3 * self.seconds


@cache
def digest(sources: tuple[str, ...]) -> str:
    """Of the files' content, also where there is no git."""
    found = blake2b(digest_size=6)
    for path in sorted({path for pattern in sources for path in ROOT.glob(pattern)}):
        found.update(path.read_bytes())
    return found.hexdigest()


# ---- which jobs


def is_current(row: Row, job: Job, machine: Row) -> bool:
    """Whether a row of this job was measured from the sources as they are, and on such a
    machine.
    """
    return {"job": job.name, "sources": digest(job.sources), **machine}.items() <= row.items()


def unknown(jobs: Iterable[Job], rows: Sequence[Row], machine: Row) -> list[Job]:
    """Jobs without a valid row, the most valuable first: one of each kind that has none, then the
    others as listed.
    """
    jobs = list(jobs)
    ends = [row for row in rows if row.get("state") == "measured"]
    known = {job.name for job in jobs if any(is_current(row, job, machine) for row in ends)}
    seen = {job.kind for job in jobs if job.name in known}
    first = list[Job]()
    others = list[Job]()
    for job in jobs:
        if job.name not in known:
            (others if job.kind in seen else first).append(job)
            seen.add(job.kind)
    return first + others


def next_job(waiting: Iterable[Job], *, seconds: float, gib: float) -> Job | None:
    """The first that fits into the time and the device memory that are left."""
    return next((job for job in waiting if job.seconds <= seconds and job.gib <= gib), None)


def affordable(jobs: Iterable[Job], seconds: float) -> list[Job]:
    """Those that will run if each takes its estimate, one after the other."""
    chosen = []
    for job in jobs:
        if job.seconds <= seconds:
            chosen.append(job)
            seconds -= job.seconds
    return chosen


def compilations(jobs: Iterable[Job]) -> list[Job]:
    """Jobs that compile what these will time."""
    return [
        Job(f"compile {job.name}", "compile", job.compilation, 20, gib=job.gib)
        for job in jobs
        if job.compilation is not None
    ]


# ---- all jobs


def compilation(case: StepCase) -> Callable[[Bench], object] | None:
    return partial(gpu_steps.compile_step, case=case) if case.config().compiles_on_gpu else None


def step_job(
    case: StepCase, kind: str, seconds: float, gib: float, rounds: Rounds | None = None
) -> Job:
    measure = partial(gpu_steps.step, case=case, rounds=rounds or Rounds())
    return Job(case.name, kind, measure, seconds, gib, alone=True, compilation=compilation(case))


def kernels_job(case: StepCase, seconds: float, gib: float) -> Job:
    measure = partial(gpu_steps.kernel_times, case=case)
    return Job(
        f"kernels of {case.name}",
        "kernels",
        measure,
        seconds,
        gib,
        alone=True,
        compilation=compilation(case),
    )


def pair_job(off: str, on: str) -> Job:
    """32K tokens of the 1.24B model without and with an option."""
    base = StepCase("1.24B", 32 * K, KEPT)
    measure = partial(gpu_steps.pair, case=base, off=off, on=on)
    compiled = compilation(base.with_option(on))
    return Job(f"pair: {on}", "pair", measure, 20, 48, alone=True, compilation=compiled)


def rival_job(case: RivalCase, seconds: float, gib: float) -> Job:
    measure = partial(gpu_rivals.rival, case=case)
    sources = ("benchmarks/gpu_rivals.py", "benchmarks/rival_step.py")
    return Job(
        case.name, case.library, measure, seconds, gib, sources, alone=True, library=case.library
    )


def errors_job(kernel: str, seconds: float) -> Job:
    return Job(
        f"errors of {kernel}",
        "errors",
        partial(gpu_kernels.errors, kernel=kernel),
        seconds,
        4,
        KERNEL_SOURCES,
    )


def wide_job(kernel: str) -> Job:
    return Job(
        f"2^32 numbers, {kernel}",
        "wide",
        partial(gpu_kernels.wide, kernel=kernel),
        10,
        60,
        KERNEL_SOURCES,
    )


def rate_job(kernel: str, width: int, tokens: int = 16 * K) -> Job:
    name = f"rate of {kernel}, heads of {width}"
    measure = partial(gpu_kernels.rates, kernel=kernel, width=width, tokens=tokens)
    return Job(name, "rate", measure, 6, 10, KERNEL_SOURCES, alone=True)


def head_job(chunk_mib: int) -> Job:
    measure = partial(
        gpu_kernels.head_seconds, case=StepCase("1.24B", 32 * K), chunk_mib=chunk_mib
    )
    sources = ("models/loss_head.py", "benchmarks/gpu_kernels.py")
    return Job(f"head, chunks of {chunk_mib} MiB", "head", measure, 6, 10, sources, alone=True)


def ring_rate_job(tokens: int) -> Job:
    measure = partial(gpu_kernels.ring_seconds, kernel="flash", tokens=tokens)
    return Job(
        f"ring of four, {tokens // K}K each", "ring rate", measure, 8, 10, RING_SOURCES, alone=True
    )


def checks() -> list[Job]:
    """Right or wrong: they run side by side."""
    return [
        Job("parity of options", "parity", gpu_parity.parity, 75),
        errors_job("flash", 6),
        errors_job("cudnn", 20),
        errors_job("efficient", 6),
        errors_job("plain", 6),
        Job("windows", "windows", gpu_parity.windows, 20),
        Job("meshes on one GPU", "mesh", gpu_parity.meshes, 60, sources=MESH_SOURCES),
        Job("kill and resume", "run", gpu_product.kill_and_resume, 75, sources=RUN_SOURCES),
        Job("errors of a ring", "ring", gpu_kernels.ring_errors, 6, sources=RING_SOURCES),
        Job(
            "gpu tests",
            "tests",
            gpu_parity.gpu_tests,
            60,
            sources=(*STEP_SOURCES, "tests/models/*.py"),
        ),
        wide_job("flash"),
        wide_job("cudnn"),
        wide_job("efficient"),
    ]


KEPT = "--memory.recompute keep_attention"
NONE = "--memory.recompute none"
EAGER = "--training.compile false"
LEAN = f"{KEPT} --memory.offload inputs --memory.head_groups 4 --memory.mlp_tile_mib 1024 --memory.blocks_per_checkpoint 4"


def timings() -> list[Job]:
    """How fast, one job at a time; the most valuable first."""
    case = partial(StepCase, "1.24B")
    titan = partial(RivalCase, "torchtitan")
    hugging = partial(RivalCase, "transformers")
    short = Rounds(1, 2, short=True)
    return [
        Job(
            "machine",
            "machine",
            gpu_kernels.machine,
            15,
            32,
            ("benchmarks/gpu_kernels.py",),
            alone=True,
        ),
        step_job(case(8 * K, NONE), "step", 12, 28),
        rival_job(titan(8 * K, "none", compile=True), 20, 36),
        step_job(case(32 * K, KEPT), "step", 20, 24),
        rival_job(titan(32 * K, "selective", compile=True), 40, 58),
        rival_job(hugging(32 * K, "full"), 20, 26),
        rate_job("cudnn", 128),
        rate_job("flash", 128),
        step_job(case(128 * K, KEPT), "step", 35, 42, short),
        pair_job(EAGER, "--training.compile true"),
        pair_job("", "--memory.offload inputs_and_attention"),
        pair_job("--training.attention flash", "--training.attention cudnn"),
        pair_job("", "--memory.head_groups 4"),
        pair_job("", "--memory.mlp_tile_mib 512"),
        pair_job("", NONE),
        step_job(StepCase("Qwen3-30B-A3B, 4 layers", 16 * K, KEPT), "mixture", 14, 54),
        step_job(StepCase("gpt-oss-20b, 4 layers", 32 * K, KEPT), "mixture", 25, 78),
        step_job(StepCase("Gemma 3 1B", 32 * K, KEPT), "windowed", 14, 20),
        kernels_job(case(8 * K, NONE), 12, 28),
        kernels_job(StepCase("Qwen3-30B-A3B, 4 layers", 16 * K, KEPT), 14, 54),
        kernels_job(case(32 * K, KEPT), 16, 24),
        kernels_job(StepCase("gpt-oss-20b, 4 layers", 32 * K, KEPT), 25, 78),
        head_job(256),
        head_job(1024),
        ring_rate_job(8 * K),
        ring_rate_job(2 * K),
        rate_job("cudnn", 64),
        rate_job("flash", 64),
        rate_job("efficient", 128),
        step_job(case(8 * K, f"{NONE} --parallelism.reshard_after_forward false"), "step", 12, 30),
        step_job(case(8 * K, f"{KEPT} {EAGER}"), "step", 10, 22),
        step_job(case(64 * K, KEPT), "step", 20, 30, short),
        rival_job(hugging(8 * K, "none"), 20, 40),
        rival_job(titan(8 * K, "none"), 20, 48),
        step_job(case(1024 * K, LEAN, document=16 * K), "step", 65, 115, Rounds(0, 1)),
        Job(
            "two ranks on one GPU",
            "mesh",
            gpu_product.two_ranks,
            50,
            40,
            RUN_SOURCES,
            alone=True,
        ),
        Job(
            "calibrate",
            "machine",
            gpu_product.calibrate,
            40,
            32,
            ("trainer/plan/calibrate.py",),
            alone=True,
        ),
        step_job(case(512 * K, KEPT), "step", 150, 122, Rounds(1, 1, short=True)),
        step_job(case(1024 * K, LEAN), "step", 520, 115, Rounds(0, 1)),
    ]


def all_jobs() -> list[Job]:
    return [*checks(), *timings()]
