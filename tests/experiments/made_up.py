"""Rows of a compress-ratio run that nobody trained: the shape of the real ones, with figures chosen by the test."""

from dsflash_jax.analysis.recall import LagBuckets
from dsflash_jax.config import ModelConfig
from dsflash_jax.shipped import config_path
from experiments.compress_ratio import BUDGETS, _plan, cells

SCHEDULES = (None, (1, 1), (2, 1), (2, 2), (4, 2), (4, 4))
BYTES = {None: 0.0, (1, 1): 70.0, (2, 1): 52.5, (2, 2): 35.0, (4, 2): 26.25, (4, 4): 17.5}
FIXED = {None: 2904, (1, 1): 2904, (2, 1): 4952, (2, 2): 7000, (4, 2): 11096, (4, 4): 11096}
CLASSES = {"near": 15, "mid": 32, "relay": 62}
EVALUATION = {"recall_rows": 512, "resting_rows": 256, "resting_patience": 0.5, "text_rows": 64}


def share(value):
    return {"value": value, "correct": None if value is None else round(1000 * value), "asked": 1000}


def recall(near, far):
    buckets = {"near": near, "mid": (near + far) / 2, "relay": far, "far": far}
    return {
        "overall": share((near + far) / 2),
        "by_bucket": {name: share(value) for name, value in buckets.items()},
        "by_alignment": {"aligned": share(far), "split": share(far)},
        "by_both": {name: {"aligned": share(min(1.0, v + 0.01)), "split": share(v)} for name, v in buckets.items()},
    }


def curve(near, far):
    edges = LagBuckets(**CLASSES).edges(128)
    shares = [near if high <= 17 else max(far, near - (high - 17) / 60) for high in edges[1:]]
    correct = [round(200 * share) for share in shares]
    return {"lag_from": edges[:-1], "lag_to": edges[1:], "correct": correct, "asked": [200] * len(correct)}


def far_by_row(far):
    """1000 answers in 250 rows, four each; the wrong ones spread over the rows."""
    wrong = 1000 - round(1000 * far)
    return {"asked": [4] * 250, "correct": [4 - wrong // 250 - (n < wrong % 250) for n in range(250)]}


def kv_bytes(schedule):
    fixed, per_token = FIXED[schedule], BYTES[schedule]
    sizes = {str(tokens): int(fixed + tokens * per_token) for tokens in (128, 512)}
    return {"per_token": per_token, "fixed": fixed, "sequence": sizes}


def row(schedule, seed=0, near=1.0, far=1.0, group="main", **changes):
    encoder, decoder = schedule or (None, None)
    curves = {"all": curve(near, far), "aligned": curve(near, far), "split": curve(near, max(0.0, far - 0.03))}
    found = {
        "group": group, "encoder": encoder, "decoder": decoder, "seed": seed, "config_sha256": "0" * 64,
        "parameters": 250_000, "lag_classes": CLASSES, "bits_per_byte": 2.6 + 0.01 * seed, "recall": recall(near, far),
        "recall_by_lag": curves,
        "far_by_row": far_by_row(far), "bits_by_row": [2.6 + 0.01 * seed + 0.1 * (n % 5 - 2) for n in range(64)],
        "informed_guess": {name: 0.14 for name in ("near", "mid", "relay", "far")}, "evaluation": EVALUATION,
        "kv_bytes": kv_bytes(schedule),
        "decode_seconds": [{"context": 128, "steps": 64, "median": 5e-4, "p10": 4e-4, "p90": 6e-4}],
        "unrounded": {"bits_per_byte": 2.5, "recall": recall(near, far)},
        "steps": 800, "switch_step": 300, "train_seconds": 60.0, "compile_seconds": 12.0, "tokens_per_second": 27_000.0,
        "solved_at_step": 400 if far >= 0.95 else None, "solved_after_seconds": 31.0 if far >= 0.95 else None,
        "probes": [],
    }
    if schedule:
        off = {"all": curve(0.4, 0.04)}
        found["global_off"] = {"bits_per_byte": 3.1, "recall": recall(0.4, 0.04), "recall_by_lag": off}
        found["all_entries"] = {"recall": recall(near, min(1.0, far + 0.01))}
        found["coverage"] = {"per_layer": [0.2, 0.98, 0.5], "mean": 0.56, "max": 0.98}
    return {**found, **changes}


def rows(seeds=(0, 1, 2), far=None, **of_control):
    """Six schedules and seeds; window only fails far unless the test says otherwise."""
    far = far or {}
    control = {"near": 0.97, "far": 0.04, **of_control}
    return [
        row(schedule, seed, **(control if schedule is None else {"far": far.get(schedule, 0.99 - 0.01 * seed)}))
        for seed in seeds
        for schedule in SCHEDULES
    ]


def plan(mode="full"):
    """The real plan of a mode, over a made-up corpus."""
    small, large = (ModelConfig.from_json(config_path(name)) for name in ("lab", "lab_large"))
    corpus = {"sha256": "a" * 64, "python": "3.11.7", "train_tokens": 7_591_843, "held_out_tokens": 690_827}
    return _plan(mode, BUDGETS[mode], list(cells(BUDGETS[mode], small, large)), corpus, None)


def manifest():
    return {
        "corpus": {"sha256": "a" * 64, "python": "3.11.7", "train_tokens": 7_591_843, "held_out_tokens": 690_827},
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
        "machine": {"cores": 2, "processor": "a processor", "jax_devices": 2},
        "sessions": [
            {
                "started": "2026-01-01T00:00:00+00:00", "git": {"commit": "c" * 40, "modified": False},
                "elapsed_seconds": 1800.0, "finished": None,
            },
            {
                "started": "2026-01-01T01:00:00+00:00", "git": {"commit": "d" * 40, "modified": False},
                "elapsed_seconds": 900.0, "finished": "2026-01-01T01:15:00+00:00",
            },
        ],
    }
