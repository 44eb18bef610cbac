"""Every table by its name: the folder of its results, how it is written, and what it is called."""

from collections.abc import Callable
from functools import partial

from benchmarks.agbn.accuracy import rows as agbn_accuracy
from benchmarks.agbn.adaptive_speed import rows as agbn_speed
from benchmarks.agbn.global_bn import rows as global_rows
from benchmarks.agbn.lanes_memory import rows as agbn_memory
from benchmarks.agbn.lanes_parts import rows as agbn_parts
from benchmarks.agbn.learns import rows as agbn_learns
from benchmarks.agbn.overlap import rows as overlap_rows
from benchmarks.concepts.memory import rows as concepts
from benchmarks.guide.draws import rows as guide_draws
from benchmarks.guide.figures import rows as guide_figures
from benchmarks.guide.finders import rows as guide_finders
from benchmarks.guide.first_hour import rows as first_hour
from benchmarks.guide.first_step import rows as guide_start
from benchmarks.guide.gpus import rows as guide_gpus
from benchmarks.guide.lanes import rows as guide_lanes
from benchmarks.guide.lengths import rows as guide_lengths
from benchmarks.guide.numbers import rows as guide_numbers
from benchmarks.guide.pace import rows as guide_pace
from benchmarks.guide.plans import rows as guide_plans
from benchmarks.guide.servers import rows as guide_servers
from benchmarks.guide.values import rows as guide_values
from benchmarks.hosts import rows as of_hosts
from benchmarks.hosts.trl import rows as of_trl
from benchmarks.integrations.accelerate import rows as of_accelerate
from benchmarks.integrations.contrastive import rows as of_contrastive
from benchmarks.integrations.language import rows as of_language
from benchmarks.integrations.lightning import rows as of_lightning
from benchmarks.integrations.transformers import rows as of_transformers
from benchmarks.mbs.adversary import rows as adversary_rows
from benchmarks.mbs.choice import rows as choice
from benchmarks.mbs.draw_layouts import rows as draw_rows
from benchmarks.mbs.first_step.rows import first_step, first_step_summary
from benchmarks.mbs.honest import rows as honest_rows
from benchmarks.mbs.peak.rows import peak
from benchmarks.mbs.prediction import rows as prediction
from benchmarks.mbs.real_limit import rows as real_limit
from benchmarks.mbs.rows import (
    LIES,
    Results,
    algorithm1,
    bf16,
    exactness,
    exactness_summary,
    lie,
    lies,
    markdown,
    overhead,
    own_losses,
    soak,
    speed,
    speed_summary,
    training,
)
from benchmarks.mbs.tables import rows as paper
from benchmarks.mbs.training_rows import HEAD, summary_row
from benchmarks.outofcore.blocks import rows as blocks_rows
from benchmarks.outofcore.cheap import rows as cheap
from benchmarks.outofcore.floors import rows as floors_rows
from benchmarks.outofcore.frontier import rows as frontier_rows
from benchmarks.outofcore.limits import rows as limits_rows
from benchmarks.outofcore.monger import rows as monger_rows
from benchmarks.outofcore.narrow import rows as narrow_rows
from benchmarks.outofcore.offload import rows as offload_rows
from benchmarks.outofcore.recompute import rows as recompute_rows
from benchmarks.outofcore.rules import rows as rules_rows
from benchmarks.outofcore.schedules import rows as outofcore
from benchmarks.outofcore.states import rows as states_rows
from benchmarks.outofcore.table1 import rows as table1_rows
from benchmarks.outofcore.tiles import rows as tiles_rows
from benchmarks.platforms.forecasts.rows import forecasts
from benchmarks.platforms.gpu.rows import gpu
from benchmarks.platforms.install import rows as of_install
from benchmarks.platforms.matrix import rows as platforms
from benchmarks.results import HERE, read
from benchmarks.ucudnn.heads import rows as conv_heads
from benchmarks.ucudnn.kernels import rows as conv_rows
from benchmarks.ucudnn.networks import rows as conv_networks
from benchmarks.ucudnn.paper import rows as conv_paper
from benchmarks.ucudnn.parallel import rows as conv_parallel
from benchmarks.ucudnn.solver import rows as conv_solver
from benchmarks.ucudnn.training import rows as conv_training

TRAINED = ("demo", "cifar", "membrane")

# The name of a table -> its folder and how it is written.
WRITERS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "exactness": ("mbs/exactness", exactness),
    "exactness_summary": ("mbs/exactness", exactness_summary),
    "adversary": ("mbs/adversary", adversary_rows.adversary),
    "adversary_summary": ("mbs/adversary", adversary_rows.adversary_summary),
    "adversary_hidings": ("mbs/adversary", adversary_rows.adversary_hidings),
    "adversary_ways": ("mbs/adversary", adversary_rows.adversary_ways),
    "honest": ("mbs/honest", honest_rows.honest),
    "honest_summary": ("mbs/honest", honest_rows.honest_summary),
    "honest_skipped": ("mbs/honest", honest_rows.honest_skipped),
    "zoos": ("mbs/zoos", honest_rows.honest),
    "zoos_summary": ("mbs/zoos", honest_rows.honest_summary),
    "zoos_skipped": ("mbs/zoos", honest_rows.honest_skipped),
    "draw_layouts": ("mbs/draw_layouts", draw_rows.draw_layouts),
    "draw_layouts_summary": ("mbs/draw_layouts", draw_rows.draw_layouts_summary),
    "draw_layouts_refused": ("mbs/draw_layouts", draw_rows.draw_layouts_refused),
    "speed": ("mbs/speed", speed),
    "speed_summary": ("mbs/speed", speed_summary),
    "bf16": ("mbs/bf16", bf16),
    "algorithm1": ("mbs/algorithm1", algorithm1),
    "lies": ("mbs/lies", lies),
    "overhead": ("mbs/overhead", overhead),
    "own_losses": ("mbs/own_losses", own_losses),
    "first_step": ("mbs/first_step", first_step),
    "first_step_summary": ("mbs/first_step", first_step_summary),
    "peak": ("mbs/peak", peak),
    "soak": ("mbs/soak", soak),
    "gpu": ("platforms/gpu", gpu),
    "stand_in": ("platforms/stand_in", gpu),
    "forecasts": ("platforms/forecasts", forecasts),
    "matrix": ("platforms/matrix", platforms.matrix),
    "choice": ("mbs/choice", choice.choice),
    "choice_summary": ("mbs/choice", choice.choice_summary),
    "choice_sweep": ("mbs/choice", choice.choice_sweep),
    "tables": ("mbs/tables", paper.tables),
    "tables_summary": ("mbs/tables", paper.tables_summary),
    "prediction": ("mbs/prediction", prediction.prediction),
    "prediction_summary": ("mbs/prediction", prediction.prediction_summary),
    "global_bn": ("agbn/global_bn", global_rows.global_bn),
    "global_bn_volume": ("agbn/global_bn", global_rows.global_bn_volume),
    "global_bn_numerics": ("agbn/global_bn", global_rows.global_bn_numerics),
    "overlap": ("agbn/overlap", overlap_rows.overlap),
    "overlap_shares": ("agbn/overlap", overlap_rows.overlap_shares),
    "lanes_memory": ("agbn/lanes_memory", agbn_memory.lanes_memory),
    "lanes_memory_scan": ("agbn/lanes_memory", agbn_memory.lanes_memory_scan),
    "lanes_memory_thresholds": ("agbn/lanes_memory", agbn_memory.lanes_memory_thresholds),
    "lanes_parts": ("agbn/lanes_parts", agbn_parts.lanes_parts),
    "lanes_parts_shares": ("agbn/lanes_parts", agbn_parts.lanes_parts_shares),
    "lanes_parts_scans": ("agbn/lanes_parts", agbn_parts.lanes_parts_scans),
    "learns": ("agbn/learns", agbn_learns.learns),
    "learns_summary": ("agbn/learns", agbn_learns.summary),
    "accuracy": ("agbn/accuracy", agbn_accuracy.accuracy),
    "cheap": ("outofcore/cheap", cheap.cheap),
    "monger": ("outofcore/monger", monger_rows.monger),
    "rules": ("outofcore/rules", rules_rows.rules),
    "offload": ("outofcore/offload", offload_rows.offload),
    "frontier": ("outofcore/frontier", frontier_rows.frontier),
    "narrow": ("outofcore/narrow", narrow_rows.narrow),
    "narrow_floors": ("outofcore/narrow", narrow_rows.narrow_floors),
    "blocks": ("outofcore/blocks", blocks_rows.blocks),
    "blocks_cuda": ("outofcore/blocks/cuda", blocks_rows.blocks_cuda),
    "tiles": ("outofcore/tiles", tiles_rows.tiles),
    "floors": ("outofcore/floors", floors_rows.floors),
    "floors_live": ("outofcore/floors", floors_rows.floors_live),
    "floors_equal": ("outofcore/floors", floors_rows.floors_equal),
    "floors_claims": ("outofcore/floors", floors_rows.floors_claims),
    "recompute": ("outofcore/recompute", recompute_rows.recompute),
    "recompute_pixels": ("outofcore/recompute", recompute_rows.recompute_pixels),
    "limits": ("outofcore/limits", limits_rows.limits),
    "limits_cgroup": ("outofcore/limits", limits_rows.cgroup),
    "table1": ("outofcore/table1", table1_rows.table1),
    "states": ("outofcore/states", states_rows.states),
    "conv_kernels": ("ucudnn/kernels", conv_rows.conv_kernels),
    "conv_step": ("ucudnn/kernels", conv_rows.conv_step),
    "conv_paper": ("ucudnn/paper", conv_paper.conv_paper),
    **{write.__name__: ("ucudnn/paper", write) for write in conv_paper.MORE},
    "conv_networks": ("ucudnn/networks", conv_networks.conv_networks),
    "conv_networks_summary": ("ucudnn/networks", conv_networks.conv_networks_summary),
    "conv_parallel": ("ucudnn/parallel", conv_parallel.conv_parallel),
    "conv_solver": ("ucudnn/solver", conv_solver.conv_solver),
    "conv_training": ("ucudnn/training", conv_training.conv_training),
    "conv_training_same": ("ucudnn/training", conv_training.conv_training_same),
    "vocabularies": ("ucudnn/heads", conv_heads.heads),
    "vocabularies_cuda": ("ucudnn/heads/cuda", conv_heads.heads_cuda),
    "vocabularies_floors": ("ucudnn/heads", conv_heads.heads_floors),
    "vocabularies_divided": ("ucudnn/heads", conv_heads.heads_divided),
    "concepts_memory": ("concepts/memory", concepts.concepts_memory),
    "guide_plans": ("guide/plans", guide_plans.guide_plans),
    "guide_plans_summary": ("guide/plans", guide_plans.guide_plans_summary),
    "guide_plans_foreseen": ("guide/plans", guide_plans.guide_plans_foreseen),
    "guide_lanes": ("guide/lanes", guide_lanes.guide_lanes),
    "guide_draws": ("guide/draws", guide_draws.guide_draws),
    "guide_draws_summary": ("guide/draws", guide_draws.guide_draws_summary),
    "guide_draws_asked": ("guide/draws", guide_draws.guide_draws_asked),
    "guide_figures": ("guide/figures", guide_figures.guide_figures),
    "guide_figures_errors": ("guide/figures", guide_figures.guide_figures_errors),
    "guide_pace": ("guide/pace", guide_pace.guide_pace),
    "guide_start": ("guide/first_step", guide_start.first_step),
    "guide_finders": ("guide/finders", guide_finders.finders),
    "guide_values": ("guide/values", guide_values.guide_values),
    "first_hour": ("guide/first_hour", first_hour.first_hour),
    "habits": ("guide/first_hour", first_hour.habits),
    "guide_lengths": ("guide/lengths", guide_lengths.guide_lengths),
    "guide_gpus": ("guide/gpus", guide_gpus.guide_gpus),
    "guide_gpus_summary": ("guide/gpus", guide_gpus.guide_gpus_summary),
    "guide_servers": ("guide/servers", guide_servers.servers),
    "guide_servers_summary": ("guide/servers", guide_servers.servers_summary),
    "guide_servers_real": ("guide/servers", guide_servers.servers_real),
    "guide_numbers": ("guide/numbers", guide_numbers.numbers),
    "guide_numbers_memory": ("guide/numbers", guide_numbers.numbers_memory),
    "guide_numbers_table2": ("guide/numbers", guide_numbers.numbers_table2),
    "schedules": ("outofcore/schedules", outofcore.schedules),
    "schedules_summary": ("outofcore/schedules", outofcore.schedules_summary),
    "adaptive_speed": ("agbn/adaptive_speed", agbn_speed.adaptive_speed),
    "adaptive_speed_accuracy": ("agbn/adaptive_speed", agbn_speed.adaptive_speed_accuracy),
    "adaptive_speed_patience": ("agbn/adaptive_speed", agbn_speed.adaptive_speed_patience),
    "real_limit": ("mbs/real_limit", real_limit.real_limit),
    "real_limit_compared": ("mbs/real_limit", real_limit.real_limit_compared),
    "language": ("integrations/language", of_language.language),
    "hosts_zoo": ("hosts/zoo", of_hosts.zoo),
    "hosts_zoo_summary": ("hosts/zoo", of_hosts.zoo_summary),
    "hosts_zoo_refused": ("hosts/zoo", of_hosts.zoo_refused),
    "hosts_trl": ("hosts/trl", of_trl.hosts_trl),
    "hosts_nnunet": ("hosts/nnunet", of_hosts.nnunet),
    "hosts_ultralytics": ("hosts/ultralytics", of_hosts.ultralytics),
    "hosts_open_clip": ("hosts/open_clip", of_hosts.open_clip),
    "install": ("platforms/install", of_install.install),
    "transformers": ("integrations/transformers", of_transformers.transformers),
    "transformers_overhead": (
        "integrations/transformers",
        of_transformers.transformers_overhead,
    ),
    "accelerate": ("integrations/accelerate", of_accelerate.accelerate),
    "accelerate_overhead": ("integrations/accelerate", of_accelerate.accelerate_overhead),
    "lightning": ("integrations/lightning", of_lightning.lightning),
    "lightning_overhead": ("integrations/lightning", of_lightning.lightning_overhead),
    "contrastive": ("integrations/contrastive", of_contrastive.contrastive),
    "contrastive_summary": ("integrations/contrastive", of_contrastive.contrastive_summary),
    "contrastive_steps": ("integrations/contrastive", of_contrastive.contrastive_steps),
    "contrastive_rest": ("integrations/contrastive", of_contrastive.contrastive_rest),
    "contrastive_orders": ("integrations/contrastive", of_contrastive.contrastive_orders),
    "contrastive_large": ("integrations/contrastive", of_contrastive.contrastive_large),
    **{name: (f"mbs/{name}", training) for name in TRAINED},
    **{path.stem: ("mbs/lies", lie(path.stem)) for path in sorted(LIES.glob("[0-9]_*.py"))},
}
TITLES = {
    "exactness": "Error of the gradient, every case and loop",
    "adversary": "Samples that couple in hiding: exact, refused, or silently wrong",
    "honest": "Honest networks: none may be refused",
    "zoos": "Networks of timm and torchvision",
    "draw_layouts": "Full-batch draws: the rules that find where a draw holds the samples",
    "speed": "Speed against the best loop by hand",
    "overhead": "What a step costs beside forward and backward",
    "own_losses": "Losses of one's own: one pass beside two",
    "first_step": "The first step of an engine, beside its second one",
    "bf16": "2048 micro-batches in bfloat16",
    "algorithm1": "The paper's Algorithm 1, word for word",
    "lies": "Five ways accumulation lies",
    "peak": "Peak memory of a step against the batch size",
    "prediction": "The memory that is foreseen, beside what a step holds",
    "choice": "The choice of a micro-batch, beside five finders and a full sweep",
    "real_limit": "A training under a limit that the kernel keeps",
    "tables": "Micro Batch Streaming: Tables 1 to 5 and Figure 3",
    "global_bn": "BatchNorm over ranks beside local BatchNorm",
    "overlap": "Gradients over ranks, summed during backward",
    "lanes_memory": "What a step in lanes holds",
    "lanes_parts": "Where the time of a step in lanes goes",
    "learns": "CIFAR-10 images: BatchNorm of 512 samples, of which 8 fit at once",
    "accuracy": "AGBN, Figure 4: accuracy that global BatchNorm gains over local",
    "cheap": "Results that are cheap to compute again",
    "monger": "The largest batch with a memory monger, as AGBN has it",
    "schedules": "Out of core: Table 1 and Figures 3 to 5, planned and simulated",
    "rules": "Out of core: how much each rule of eviction gains",
    "offload": "Out of core: a step by hand within a budget, beside the same in memory",
    "frontier": "Out of core: the memory and the time of a step, every way beside the others",
    "narrow": "Out of core: lanes of which not even one fits",
    "blocks": "Out of core: blocks computed again, beside checkpoints by hand",
    "tiles": "Out of core: modules of single tokens in tiles of tokens",
    "floors": "Out of core: the least memory of one sample, beside flags of other libraries",
    "recompute": "Out of core: cheap results computed again in real steps",
    "limits": "Out of core: a step that does not fit, under a limit that the system keeps",
    "table1": "Out of core: Table 1 on a device",
    "states": "Out of core: a training whose states are larger than its memory",
    "conv_kernels": "u-cuDNN: convolutions with large or long windows, on a CPU",
    "conv_paper": "u-cuDNN: the paper's tables and figures",
    "conv_networks": "u-cuDNN: whole steps of networks, within 64 MiB for each kernel",
    "conv_parallel": "u-cuDNN: several processes that measure at a time",
    "conv_solver": "u-cuDNN: dividing a network's workspace, beside HiGHS",
    "conv_training": "u-cuDNN: whole trainings with large and long windows",
    "vocabularies": "u-cuDNN: heads of a vocabulary and their losses, in chunks of rows",
    "concepts_memory": "Concepts: live bytes over one step, in every way",
    "guide_plans": "Plans: what they foresee and choose, beside every candidate that was run",
    "guide_lanes": "Plans: what lanes hold against what was foreseen",
    "guide_draws": "Plans: random trainings and budgets, each under a hard limit",
    "guide_start": "Plans: the first step under a budget, and the first fifty",
    "guide_finders": "Plans: fifty steps under a budget, beside finders of a size",
    "guide_values": "Plans: memory that depends on the values of a batch",
    "first_hour": "A new user's first hour",
    "guide_lengths": "Plans: batches of many lengths, beside a loop by hand",
    "guide_pace": "Plans: the seconds of a whole run, foreseen and taken",
    "guide_gpus": "Guide: Lemma 3.1 and the refined model, beside real processes",
    "guide_servers": "Guide: Lemma 3.2, beside its simulation and real processes",
    "guide_figures": "Guide: Figures 2 and 3, throughput and convergence by mini-batch",
    "guide_numbers": "Guide: its own numbers, and Table 2",
    "adaptive_speed": "AGBN, Figure 5: adaptive BatchNorm beside always-global",
    "language": "A language model on rows of uneven length: the batch's mean, and means of means",
    "hosts_zoo": "Networks of timm and MONAI",
    "hosts_trl": "TRL's trainers: errors of a step's gradient",
    "hosts_nnunet": "nnU-Net's plans: errors of a step's gradient",
    "hosts_ultralytics": "Networks of ultralytics: errors of a step's gradient",
    "hosts_open_clip": "open_clip's accumulation: errors of a step's gradient",
    "transformers": "transformers.Trainer: errors of a step's gradient, and its seconds",
    "accelerate": "accelerate's loop: errors of a step's gradient, and its seconds",
    "lightning": "Lightning's Trainer: errors of a step's gradient, and its seconds",
    "contrastive": "Contrastive training: beside GradCache and sentence-transformers",
    "demo": "Digits: what `make demo` trains",
    "cifar": "CIFAR-10 images: a training with its curves",
    "membrane": "Membrane images: a training with its curves",
}
MORE = {
    "hosts_zoo": ("hosts_zoo_refused",),
    "vocabularies": ("vocabularies_cuda", "vocabularies_floors", "vocabularies_divided"),
    "adversary": ("adversary_hidings", "adversary_ways"),
    "honest": ("honest_skipped",),
    "zoos": ("zoos_skipped",),
    "draw_layouts": ("draw_layouts_refused",),
    "global_bn": ("global_bn_volume", "global_bn_numerics"),
    "adaptive_speed": ("adaptive_speed_accuracy", "adaptive_speed_patience"),
    "overlap": ("overlap_shares",),
    "choice": ("choice_sweep",),
    "lanes_memory": ("lanes_memory_scan", "lanes_memory_thresholds"),
    "lanes_parts": ("lanes_parts_shares", "lanes_parts_scans"),
    "real_limit": ("real_limit_compared",),
    "blocks": ("blocks_cuda",),
    "floors": ("floors_live", "floors_equal", "floors_claims"),
    "recompute": ("recompute_pixels",),
    "limits": ("limits_cgroup",),
    "narrow": ("narrow_floors",),
    "conv_kernels": ("conv_step",),
    "conv_paper": tuple(write.__name__ for write in conv_paper.MORE),
    "conv_training": ("conv_training_same",),
    "guide_plans": ("guide_plans_foreseen",),
    "guide_draws": ("guide_draws_asked",),
    "guide_figures": ("guide_figures_errors",),
    "guide_servers": ("guide_servers_real",),
    "guide_numbers": ("guide_numbers_memory", "guide_numbers_table2"),
    "first_hour": ("habits",),
    "transformers": ("transformers_overhead",),
    "accelerate": ("accelerate_overhead",),
    "lightning": ("lightning_overhead",),
    "contrastive": (
        "contrastive_steps",
        "contrastive_rest",
        "contrastive_orders",
        "contrastive_large",
    ),
}
"""Tables that stand below the first one on its page."""
PICTURES = {
    "guide_figures": (
        ("figure_2.png", "samples a second by mini-batch, within one memory"),
        ("figure_3.png", "test error by epoch, for a range of mini-batches"),
    ),
    "peak": (("peak.png", "peak memory of a step against the batch size"),),
    "concepts_memory": (("memory.png", "live bytes over one step of one network, in every way"),),
    "frontier": (("frontier.png", "seconds of a step against the memory that it holds"),),
    "schedules": (
        ("figure_3.png", "the largest budgets that allocators serve, by batch"),
        ("figure_4.png", "images a second by batch, on three machines"),
        ("figure_5.png", "memory by batch, without a schedule and with one"),
        ("windows.png", "speed of every window of the paper's policy"),
    ),
    "conv_paper": (
        ("figure_1.png", "the best algorithm's workspace and a byte less: the largest cliffs"),
        ("figure_9.png", "AlexNet's conv2 within 64 MiB, by policy"),
        ("figure_10.png", "networks at three workspaces, by policy"),
        ("figure_12.png", "memory of every layer, undivided and divided"),
        ("figure_13.png", "WD beside WR at equal totals"),
        ("figure_14.png", "shares of a total, the twelve largest of each network"),
    ),
}
"""Pictures of a table and what they show; those that are there stand below it."""
MADE = {
    "mbs/soak": "make soak",
    "platforms/matrix": "make matrix",
    "platforms/gpu": "make gpu-check",
    "platforms/forecasts": "make gpu-check",
    "platforms/stand_in": "python -m tests.devices -m benchmarks.platforms.gpu.run --out "
    "benchmarks/platforms/stand_in",
}
"""Folders whose results a command of the Makefile makes."""
OPTIONS = {
    "mbs/demo": " --out benchmarks/mbs/demo",
    "mbs/tables": " --images DIR --membrane DIR",
    "mbs/cifar": " --data DIR",
    "mbs/membrane": " --data DIR",
    "outofcore/table1": " --device cuda --cap 16GiB",
    "agbn/learns": " --images DIR",
    "ucudnn/training": " --images DIR",
    "agbn/accuracy": " --images DIR",
    "agbn/adaptive_speed": " --images DIR",
}


def pictures(name: str, folder: str = "") -> list[str]:
    """The pictures of a table in markdown, with the way to their folder before their names."""
    at = HERE / WRITERS[name][0]
    images = (*PICTURES.get(name, ()), ("curves.png", "learning curves"))
    return [f"![{what}]({folder}{file})" for file, what in images if (at / file).exists()]


def command(folder: str) -> str:
    """The command that makes the results of a folder."""
    if folder in MADE:
        return MADE[folder]
    return f"python -m benchmarks.{folder.replace('/', '.')}.run{OPTIONS.get(folder, '')}"


def table(name: str) -> str:
    """The markdown of one table, or one line that names the command to run first."""
    folder, write = WRITERS[name]
    results = read(HERE / folder / "results.json")
    if results is None:
        return f"*No results yet: run `{command(folder)}`.*"
    return write(results)


def trainings() -> str:
    """One row for each recorded training, or the command that makes it."""
    rows = []
    for name in TRAINED:
        results = read(HERE / WRITERS[name][0] / "results.json")
        empty = [f"*no results yet: run `{command(WRITERS[name][0])}`*"] + [""] * (len(HEAD) - 1)
        rows.append(empty if results is None else summary_row(results))
    return markdown(HEAD, rows)


def plan() -> str:
    """The plan of the README's example, as a test has pinned it."""
    pinned = read(HERE.parent / "tests" / "repository" / "pinned.json")
    if pinned is None:
        return "*No results yet: run `python -m tests.repository.test_pinned`.*"
    lines = pinned["readme"]
    (chosen,) = [k for k, line in enumerate(lines) if line.endswith("chosen")]
    first = next(k for k, line in enumerate(lines) if line.endswith("not timed"))
    shown = [*lines[: first + 1], "          ...", *lines[chosen - 1 :]]
    return "\n".join(["```text", *shown, "```"])


TABLES: dict[str, Callable[[], str]] = {name: partial(table, name) for name in WRITERS}
TABLES["trainings"] = trainings
TABLES["plan"] = plan
