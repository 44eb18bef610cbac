"""What of the paper does not reproduce, in words, with the figures of the results file."""

from typing import Any

Results = dict[str, Any]
Point = Any
"""Words, or something false where the network was not planned."""
GIB = 1 << 30


def differences(results: Results) -> str:
    """A list, one point for each difference whose network was planned."""
    points = [one for write in POINTS if (one := write(results["networks"]))]
    return "\n".join(f"- {one}" for one in points)


def _speeds(networks: Results) -> Point:
    found = networks.get("resnet50", {}).get("928")
    if not found:
        return None
    machine = found["machines"]["V100, NVLink"]
    moved = machine["default"]["out"] + machine["default"]["in"]
    seconds, wide = 928 / 409, found["wide"]
    return (
        f"**Table 1 out of core.** Its 409 images a second at 928 are {seconds:.2f} s a step. What "
        "exceeds 16 GiB at the peak must leave before it and return after it: "
        f"{moved / 1e9:.0f} GB both ways, {moved / 50e9:.2f} s at 50 GB/s. So no schedule of these "
        "tensors reaches the paper's speed at 50 GB/s each way: its link is faster, or its "
        f"framework keeps less. At 100 GB/s its policy takes {wide['window']['seconds']:.2f} s in "
        f"the simulator, the default {wide['default']['seconds']:.2f} s, and the bound is "
        f"{wide['bound']:.2f} s."
    )


def _roofline(networks: Results) -> Point:
    return "resnet50" in networks and (
        "**Speed in memory.** The paper's rises from 336 images a second at 64 to 581 at 190, and "
        "its Pix2PixHD is faster out of core than in memory, because kernels like large batches. A "
        "roofline does not know that: every batch has the speed of 190. What mapping virtual "
        "addresses costs (415 instead of 533 at 190) is not simulated either."
    )


def _densenet(networks: Results) -> Point:
    found = networks.get("densenet121", {}).get("512")
    return found and (
        "**DenseNet in memory at 512.** With the tensors that torch keeps, DenseNet-121 at 224x224 "
        f"needs {found['peak'] / GIB:.0f} GiB at 512. The paper does not say which DenseNet it is, "
        "nor what its framework keeps of it."
    )


def _deeplab(networks: Results) -> Point:
    found = networks.get("deeplab", {}).get("6")
    return found and (
        "**DeepLabv3+ in memory at 6.** Six images need "
        f"{found['peak'] / GIB:.1f} GiB here, with Xception-65 at output stride 16, so more would "
        "fit. The paper names no backbone."
    )


def _pix2pixhd(networks: Results) -> Point:
    found = networks.get("pix2pixhd", {}).get("4")
    return found and (
        "**Pix2PixHD in memory at 4.** The paper trains the whole of it; here it is the generator "
        f"with an L1 loss, which needs {found['peak'] / GIB:.1f} GiB at 4."
    )


def _chunks(networks: Results) -> Point:
    found = networks.get("resnet50", {}).get("190")
    return found and (
        "**Chunks of 40 MiB for everything.** Hundreds of parameters, states and statistics would "
        f"each take one: {found['waste']['window']['chunks of 40 MiB']:.0%} more than is held at "
        "190, where the paper trains in 16 GiB. So small requests must be served otherwise, which "
        "it does not mention; the pool for requests below 1 MiB is an assumption."
    )


def _best_fit(networks: Results) -> Point:
    found = networks.get("resnet50", {}).get("928")
    if not found:
        return None
    budgets = found["budgets"]["window"]
    caching, paged = budgets["best fit, caching"], budgets["expandable segments"]
    return (
        "**Half of the memory lost at 928.** The paper could define a budget of 8 GB there with "
        f"the caching allocator; the simulated one serves {caching['budget'] / GIB:.1f} GiB, and "
        f"expandable segments {paged['budget'] / GIB:.1f}. The direction is the paper's, the size "
        "depends on the sizes of its allocator's segments."
    )


def _parts(networks: Results) -> Point:
    ones = [
        (one["default"]["seconds"] / one["in parts"]["seconds"], name, n)
        for name, sizes in networks.items()
        for n, found in sizes.items()
        for one in found.get("machines", {}).values()
        if one.get("in parts")
    ]
    if not ones:
        return None
    total = sum(len(f.get("machines", {})) for sizes in networks.values() for f in sizes.values())
    more = sum(ratio > 1.03 for ratio, _, _ in ones)
    best, name, n = max(ones)
    return (
        "**Parts of a variable.** The linear program may let a part of a variable leave, the "
        f"schedules may not. In {total - len(ones)} of {total} steps the default is within 3% of "
        "the bound, so parts could not win as much. In the others every variable from 64 MiB on "
        f"was cut into four: {more} of them are more than 3% faster, {name} at {n} the most, "
        f"{best - 1:.1%}. A storage is one piece of memory, so nothing here could execute that."
    )


POINTS = (_speeds, _roofline, _densenet, _deeplab, _pix2pixhd, _chunks, _best_fit, _parts)
