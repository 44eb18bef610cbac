"""What is to be run, as data: the models, their sizes, and the trainings of each table.

Nothing here trains. A `Job` is all that decides the outcome of one training, so two tables that
need the same training name the same job, and it is run once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from anybatch.cli.settings import RecipeName, Settings, Task
from benchmarks.environment import MALLOC as MODES

MIB, GIB = 2**20, 2**30
BATCHNORM = "batchnorm"
TABLES = ("table1", "table2", "table3", "table4", "table5", "figure3", BATCHNORM)
OF_TASK: dict[str, Task] = {
    "table3": "segmentation",
    "table5": "segmentation",
    "table4": "classification",
    "figure3": "classification",
}
BATCHES_OF_TABLE1 = (2, 16)
TIGHT = {"MALLOC_MMAP_THRESHOLD_": str(8 * MIB), "MALLOC_TRIM_THRESHOLD_": str(64 * MIB)}
# Lanes take turns, so one arena is enough; parked blocks go back to the system at once.
MAPPED = {
    "MALLOC_MMAP_THRESHOLD_": str(MIB // 4),
    "MALLOC_TRIM_THRESHOLD_": str(MIB),
    "MALLOC_ARENA_MAX": "1",
}
MALLOC = {**MODES, "tight": TIGHT, "mapped": MAPPED}


Way = Literal["undivided", "micro", "norm", "exact"]
NORMED: tuple[Way, ...] = ("norm", "exact")
UNDIVIDED_WAYS: tuple[Way, ...] = ("undivided", "norm")


@dataclass(frozen=True)
class Resolution:
    """How a model sees an image: resized to (height, width), padded, cropped; None: as it is."""

    image: tuple[int, int] | None
    crop: int | None = None
    pad: int = 0

    @property
    def pixels(self) -> int:
        """Height of what the model sees; 0 where that is left to the files."""
        return self.crop or (self.image[0] if self.image is not None else 0)


@dataclass(frozen=True)
class Case:
    """One model: the command's name for it, its recipe, its two image sizes, its cap in bytes.

    `initial` is where the search for the largest undivided mini-batch begins; `paper` is the
    paper's model whose figures stand beside; `malloc` the mode that both of its trainings run in;
    `lr` None takes the recipe's.
    """

    name: str
    paper: str
    task: Task
    model: str
    recipe: RecipeName
    small: Resolution | None
    large: Resolution
    initial: int
    cap: int
    malloc: str = "default"
    lr: float | None = None


@dataclass(frozen=True)
class Preset:
    """How large everything is; `samples` None takes every image of the folder, once an epoch."""

    cases: tuple[Case, ...]
    samples: int | None
    epochs: int
    seeds: tuple[int, ...]
    largest: int = 1024
    batches: int | None = None
    device: str = "cpu"
    workers: int = 0


@dataclass(frozen=True)
class Job:
    """One training. `way` is "undivided", or "micro" in micro-batches of `micro`.

    Both have GroupNorm; "norm" is undivided with BatchNorm, and "exact" is BatchNorm of the whole
    mini-batch in micro-batches. A new field would be another job: finished ones would not be found.
    """

    case: str
    model: str
    recipe: RecipeName
    look: Resolution
    samples: int | None
    batch: int
    micro: int
    way: Way
    seed: int
    epochs: int
    cap: int
    device: str
    workers: int
    malloc: str
    lr: float | None

    def settings(self, data: str, crops: int) -> Settings:
        """Return what the command would be told."""
        return Settings(
            data=data,
            model=self.model,
            recipe=self.recipe,
            norm="batch" if self.way in NORMED else "group",
            batch_size=self.batch,
            micro_batch=self.micro,
            epochs=self.epochs,
            lr=self.lr,
            image_size=self.look.image,
            crop=self.look.crop,
            crops=crops,
            pad=self.look.pad,
            seed=self.seed,
            workers=self.workers,
            threads=1 if self.device == "cpu" else None,
            device=self.device,
        )

    def __str__(self) -> str:
        how = "undivided" if self.way in UNDIVIDED_WAYS else f"in micro-batches of {self.micro}"
        how += " with BatchNorm" if self.way in NORMED else ""
        return f"{self.case} at {self.look.pixels} px, batch {self.batch} {how}, seed {self.seed}"

    @property
    def lanes(self) -> int:
        """Threads of a step: micro-batches that wait for each other; 0 where none does."""
        return -(-self.batch // self.micro) if self.way == "exact" else 0


def _square(size: int, pad: int = 0) -> Resolution:
    return Resolution((size, size), pad=pad)


RESNET_20 = Case(
    name="ResNet-20",
    paper="ResNet-50",
    task="classification",
    model="resnet20",
    recipe="mbs-resnet",
    small=_square(16, 2),
    large=_square(32, 4),
    initial=16,
    cap=82 * MIB,
)
AMOEBANET = Case(
    name="AmoebaNet-D (3, 32)",
    paper="AmoebaNet-D",
    task="classification",
    model="amoebanet-d:3,32",
    recipe="mbs-amoebanet",
    small=None,
    large=_square(64, 8),
    initial=32,
    cap=308 * MIB,
    lr=0.01,  # at the recipe's 0.1 this small one stays at chance for eight epochs
)
UNET_16 = Case(
    name="U-Net, width 16",
    paper="U-Net",
    task="segmentation",
    model="unet:16",
    recipe="mbs-unet",
    small=Resolution((256, 256), 32),
    large=Resolution((512, 512), 64),
    initial=16,
    cap=275 * MIB,
    malloc="tight",
)
SMALL = Preset(cases=(RESNET_20, AMOEBANET, UNET_16), samples=2000, epochs=8, seeds=(0, 1, 2))
QUICK = replace(SMALL, samples=80, epochs=2, seeds=(0,), batches=2)

RESNET_50 = replace(
    RESNET_20, name="ResNet-50", model="resnet50", small=_square(32), large=_square(224)
)
RESNET_101 = replace(
    RESNET_50, name="ResNet-101", paper="ResNet-101", model="resnet101", small=None, initial=8
)
LARGE_AMOEBANET = replace(
    AMOEBANET, name="AmoebaNet-D (6, 190)", model="amoebanet-d:6,190", large=_square(416)
)
UNET_64 = replace(
    UNET_16,
    name="U-Net, width 64",
    model="unet:64",
    small=Resolution((160, 240), 96),
    large=Resolution((640, 959), 384),
)
FULL = Preset(
    cases=tuple(
        replace(case, cap=24 * GIB, malloc="default", lr=None)
        for case in (RESNET_50, RESNET_101, LARGE_AMOEBANET, UNET_64)
    ),
    samples=None,
    epochs=30,
    seeds=(0, 1, 2),
)


def undivided(
    preset: Preset, case: Case, batch: int, seed: int, resolution: Resolution | None = None
) -> Job:
    """Return the training without micro-batches."""
    return Job(
        case=case.name,
        model=case.model,
        recipe=case.recipe,
        look=resolution or case.large,
        samples=preset.samples,
        batch=batch,
        micro=batch,
        way="undivided",
        seed=seed,
        epochs=preset.epochs,
        cap=case.cap,
        device=preset.device,
        workers=preset.workers,
        malloc=case.malloc,
        lr=case.lr,
    )


def in_micro_batches(preset: Preset, case: Case, batch: int, initial: int, seed: int) -> Job:
    """Return the training in micro-batches of the size that the paper takes.

    That is half the initial mini-batch for that mini-batch, and the initial one for larger ones.
    """
    micro = max(1, initial // 2) if batch == initial else initial
    return replace(undivided(preset, case, batch, seed), micro=micro, way="micro")


def with_batchnorm(preset: Preset, case: Case, batch: int, initial: int, seed: int) -> list[Job]:
    """Return the training with BatchNorm without micro-batches, and the exact one in the same."""
    exact = replace(in_micro_batches(preset, case, batch, initial, seed), way="exact")
    if preset.device == "cpu":
        exact = replace(exact, malloc="mapped")
    return [replace(undivided(preset, case, batch, seed), way="norm"), exact]


def batches(preset: Preset, initial: int) -> list[int]:
    """Return the mini-batches of tables 4 and 5: the initial one, doubled up to the largest."""
    sizes = [initial]
    while 2 * sizes[-1] <= preset.largest:
        sizes.append(2 * sizes[-1])
    return sizes[: preset.batches]


def of_table(table: str, preset: Preset, initial: Mapping[str, int]) -> list[Job]:
    """Return the trainings of a table, given the initial mini-batch of each case.

    Table 2 is the search for those, so it has no other training. BATCHNORM are the columns of
    tables 3 to 5 with BatchNorm.
    """
    jobs: list[Job] = []
    if table == BATCHNORM:
        return [
            job
            for seed in preset.seeds
            for case in preset.cases
            for batch in (batches(preset, initial[case.name]) if case.name in initial else [])
            for job in with_batchnorm(preset, case, batch, initial[case.name], seed)
        ]
    for case in preset.cases:
        if table == "table1" and case.small is not None:
            resolutions = (case.small, case.large)
            rows = [
                (resolution, batch) for resolution in resolutions for batch in BATCHES_OF_TABLE1
            ]
            jobs += [
                undivided(preset, case, batch, seed, resolution)
                for seed in preset.seeds
                for resolution, batch in rows
            ]
        elif OF_TASK.get(table) == case.task and case.name in initial:
            first = initial[case.name]
            sizes = batches(preset, first) if table in ("table4", "table5") else [first]
            for seed in preset.seeds:
                for batch in sizes:
                    jobs.append(undivided(preset, case, batch, seed))
                    jobs.append(in_micro_batches(preset, case, batch, first, seed))
    return jobs
