"""`coa bench rollout`: sampled tokens per second of whole rollouts, ours beside peers.

Goes in: how many rollouts at once. Comes out: the median of three runs of every engine, prefill
included, loading and a warm-up not. All get the same weights, type of numbers, threads and work.
One engine computes at a time. A peer that cannot run is reported with its reason.

Beside them stands the most that this machine's own peaks allow for the same work.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec

from coa.engines.codec import Codec
from coa.engines.store import BASE, model_folder, resolve
from coa.errors import EngineError, MissingExtra
from coa.evaluate.rollout_players import Player, play_generate, play_ours, play_vllm
from coa.evaluate.rollout_work import Cost, Lengths, Texts, Work, cost
from coa.machine import cores, native_bfloat16
from coa.runs import Json

Note = Callable[[str], None]
PEERS: Mapping[str, Player] = {"generate": play_generate, "vllm": play_vllm}
RUNS = 3
_WARM_UP_TOKENS = 8
_MATRIX, _READ, _TRIES = 4096, 1 << 28, 5


def bench_rollout(
    rollouts: Sequence[int],
    note: Note = lambda line: None,
    *,
    model: str = BASE,
    lengths: Lengths | None = None,
    peers: Mapping[str, Player] = PEERS,
    runs: int = RUNS,
) -> Json:
    """Tokens per second at each number of rollouts, ours over each peer, the machine's peaks."""
    if find_spec("torch") is None:
        raise MissingExtra("Measuring rollouts", "train")
    from coa.engines.shape import read_config

    lengths = lengths or Lengths()
    dtype = "bfloat16" if native_bfloat16() else "float32"
    folder = model_folder(resolve(model))
    texts, config = Texts(Codec.from_folder(folder)), read_config(folder)
    peaks = _Peaks.measure(dtype)
    measured = _Measured(model, dtype, note)
    atop: dict[str, Json] = {}
    for n in rollouts:
        warm_up = dataclasses.replace(lengths, sampled=_WARM_UP_TOKENS, turns=2)
        works = [texts.work(n, warm_up), *(texts.work(n, lengths) for _ in range(runs))]
        ours = measured.play("ours", play_ours, works)
        for name, play in peers.items():
            measured.try_to_play(name, play, works)
        least = cost(works[-1], config, 2 if dtype == "bfloat16" else 4)
        atop[str(n)] = peaks.share(least, works[-1].tokens, ours)
    return {
        "unit": "tokens/s",
        "speed": measured.speeds,
        "ratio": measured.ratios(),
        "missing": measured.missing,
        "peak": peaks.to_json() | {"rollouts": atop},
        "model": model,
        "dtype": dtype,
        "threads": cores(),
        "runs": runs,
        "lengths": dataclasses.asdict(lengths),
        "versions": measured.versions,
    }


class _Measured:
    """What came out so far, by number of rollouts and name."""

    def __init__(self, model: str, dtype: str, note: Note) -> None:
        self._model, self._dtype, self._note = model, dtype, note
        self.speeds: dict[str, dict[str, float]] = {}
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def play(self, name: str, play: Player, works: Sequence[Work]) -> float:
        """Tokens per second: the median of all works but the first, which warms up."""
        n, found = len(works[0].prompts), list[float]()
        for index, done in enumerate(play(self._model, self._dtype, works)):
            if done.tokens != works[index].tokens:
                raise EngineError(f"sampled {done.tokens} tokens, expected {works[index].tokens}.")
            self.versions[name] = done.version
            speed = done.tokens / done.seconds
            if index:
                found.append(speed)
                self._note(f"{name}, {n} rollouts, run {index}: {speed:.0f} tokens/s")
        median = round(statistics.median(found), 1)
        self.speeds.setdefault(str(n), {})[name] = median
        return median

    def try_to_play(self, name: str, play: Player, works: Sequence[Work]) -> None:
        if name in self.missing:
            return
        try:
            self.play(name, play, works)
        except Exception as exc:  # whatever stops a peer must not stop the measurement
            self.missing[name] = str(exc) or type(exc).__name__
            self._note(f"{name} is not measured: {self.missing[name]}")

    def ratios(self) -> dict[str, dict[str, float]]:
        """Ours over each peer."""
        return {
            n: {name: round(found["ours"] / found[name], 2) for name in found if name != "ours"}
            for n, found in self.speeds.items()
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _Peaks:
    """The most that torch reaches on this machine, on all threads."""

    flops: float
    """Per second, in a large product of matrices of the type in use."""
    bandwidth: float
    """Bytes read per second, far beyond the caches."""

    @staticmethod
    def measure(dtype: str) -> _Peaks:
        import torch

        torch.set_num_threads(cores())
        square = torch.randn(_MATRIX, _MATRIX).to(getattr(torch, dtype))
        long = torch.ones(_READ, dtype=torch.float32)
        with torch.inference_mode():
            product = _shortest(lambda: torch.mm(square, square))
            reading = _shortest(lambda: long.sum())
        return _Peaks(2 * _MATRIX**3 / product, 4 * _READ / reading)

    def share(self, least: Cost, tokens: int, speed: float) -> Json:
        """How a speed stands to the peaks, for a work of so many sampled tokens."""
        seconds = tokens / speed
        flops = (least.prefill_flops + least.decode_flops) / seconds
        limit = tokens / least.seconds(self.flops, self.bandwidth)
        return {
            "gflops_per_s": round(flops / 1e9, 1),
            "of_peak_flops": round(flops / self.flops, 3),
            "limit": round(limit, 1),
            "of_limit": round(speed / limit, 3),
        }

    def to_json(self) -> Json:
        return {
            "gflops_per_s": round(self.flops / 1e9, 1),
            "gb_per_s": round(self.bandwidth / 1e9, 1),
        }


def _shortest(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def rollout_lines(result: Json) -> Iterator[str]:
    """The result as a small table."""
    unit = result["unit"]
    for n, speeds in result["speed"].items():
        for name, speed in speeds.items():
            ratio = result["ratio"][n].get(name)
            beside = "" if ratio is None else f"   ours / peer {ratio:.2f}"
            yield f"{f'{name}, {n} rollouts':<28} {speed:>10.1f} {unit}{beside}"
    for name, reason in result["missing"].items():
        yield f"{name} is not measured: {reason}"
    peak = result["peak"]
    yield (
        f"{result['model']}, {result['dtype']}, {result['threads']} threads, median of "
        f"{result['runs']} runs; peaks of the machine: {peak['gflops_per_s']:.0f} GFLOP/s, "
        f"{peak['gb_per_s']:.1f} GB/s"
    )
    for n, share in peak["rollouts"].items():
        yield (
            f"ours, {n} rollouts: {share['gflops_per_s']:.0f} GFLOP/s, "
            f"{share['of_peak_flops']:.0%} of the peak; {share['of_limit']:.0%} of the "
            f"{share['limit']:.0f} {unit} that both peaks allow"
        )
