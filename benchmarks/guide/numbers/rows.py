"""The guide's numbers as tables in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
MB = 10**6


def numbers(results: Results) -> str:
    """What the guide says, and what is found."""
    one, sent, drawn = results["lemmas"], results["traffic"], results["classes"]
    rows = [
        [
            "Lemma 3.1: overhead that 4 GPUs at 80 % may have",
            "9 %",
            f"{one['overhead at 80 %, 4 GPUs']:.1%}",
        ],
        [
            "Lemma 3.1: GPUs for 3 times the speed, overhead 10 %",
            "4",
            f"{one['GPUs for 3x at 10 %']} ({one['speedup of 4 at 10 %']:.2f} times; "
            f"3 are {one['speedup of 3 at 10 %']:.2f} times)",
        ],
        [
            "Amdahl: the most where half is not parallel",
            "2",
            f"{one['limit at 50 % not parallel']:g}",
        ],
        [
            "AlexNet: bytes of an update",
            "around 180 MB",
            f"{sent['ours']['bytes'] / MB:.0f} MB, all parameters of Table 2's network",
        ],
        [
            "AlexNet: seconds of a push on 1 Gbit/s",
            "exceeds its capacity",
            f"{sent['printed']['push']:.2f} s with 180 MB, {sent['ours']['push']:.2f} s with ours",
        ],
        [
            "AlexNet: the shortest round on 1 Gbit/s that hides pull and push",
            "not said",
            f"{sent['printed']['shortest round']:.1f} s with 180 MB, "
            f"{sent['ours']['shortest round']:.1f} s with ours, with any number of servers",
        ],
        [
            "ImageNet: samples that hold each of 1000 equal classes",
            "at least 1000",
            f"{drawn['0.5']} for a chance of 1/2, {drawn['0.95']} for 95 %",
        ],
    ]
    return markdown(["number", "guide", "found"], rows)


def numbers_memory(results: Results) -> str:
    """Equations 2 to 5."""
    rows = []
    names = {"printed": "Equation 4 as printed", "mended": "outputs of all samples, all biases"}
    for name, title in names.items():
        one = results["memory"][name]
        keys = ("features", "parameters", "classifier", "total", "bound")
        rows.append([title, *(f"{one[key] / MB:.1f}" for key in keys)])
    head = ["AlexNet, 128 samples, 12 GiB", "Eq. 2, MB", "Eq. 3, MB", "Eq. 4, MB", "sum, MB"]
    return markdown([*head, "Eq. 5: left, MB"], rows)


def numbers_table2(results: Results) -> str:
    """Table 2: the formula, then all others that are as near."""
    found = results["table 2"]
    layers = ["1st", "2nd", "3rd", "4th", "5th"]
    rows = [["printed", *(f"{one:.1f}" for one in found["printed"]), ""]]
    rows.append(_formula(found["ours"], "**taken:** "))
    others = [one for one in found["near"] if one["names"] != found["ours"]["names"]]
    rows += [_formula(one, "") for one in others]
    text = (
        "### Table 2: FFT over GEMM, bytes\n\nTaken is 2 n (n/2 + 1) (X C + X K + C K) / "
        "(X n² C + X m² K): X samples, C channels of n x n, K filters, outputs of m x m. Of "
        f"{found['tried']} formulas of this form {len(found['near'])} are within 5 % everywhere, "
        "so the printed ratios do not tell which one was meant; the one taken is the one that "
        "needs neither padding nor anything of GEMM but what it reads and writes."
    )
    return f"{text}\n\n{markdown(['formula', *layers, 'largest error'], rows)}"


def _formula(one: Results, before: str) -> list[str]:
    side, words, gemm = one["names"]
    pairs = zip(one["ratios"], one["errors"], strict=True)
    cells = [f"{ratio:.2f} ({error:+.1%})" for ratio, error in pairs]
    return [f"{before}{words}, side: {side}; over {gemm}", *cells, f"{one['worst']:.1%}"]
