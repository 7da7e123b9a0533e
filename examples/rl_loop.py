"""Agentic reinforcement learning in one file, without abstraction: GRPO as DAPO changed it.

A question names a thing: where does its owner live? Nobody can know it, because owners and homes
are drawn anew for every question. The model has to call `owner` with the thing, `home` with the
person it is told of, and to answer with the town it is told of. It starts as an imitator of sloppy
demonstrations; from then on it hears only whether its answer was right. `coa rl` does the same
with real models and tools (src/coa/train/rl.py).
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

THINGS = "lamp kite drum book boat sock".split()
PEOPLE = "Ann Bob Cho Dan Eve Fay".split()
TOWNS = "Rome Lima Oslo Bern Kyiv Bonn".split()
BLOCKS = {"owner": THINGS, "home": PEOPLE, "answer": TOWNS}  # and what may stand inside
TAGS = [f"<{end}{name}>" for name in (*BLOCKS, "observation") for end in ("", "/")]
WORDS = ["question:", "unknown", *TAGS, *THINGS, *PEOPLE, *TOWNS]
ID = {word: number for number, word in enumerate(WORDS)}  # a token is a word
IMITATIONS, UPDATES, QUESTIONS, GROUP, PASSES, LONGEST = 150, 40, 16, 8, 2, 18
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # DAPO: more room for what becomes likelier than for what does not


@dataclass
class Rollout:
    """A question and all that was said about it; the lists have one entry for each token."""

    tools: dict[str, dict[str, str]]
    gold: str
    ids: list[int] = field(default_factory=list)
    mine: list[float] = field(default_factory=list)  # 1 where the model wrote it, else 0
    logprobs: list[float] = field(default_factory=list)  # when it was sampled
    reward: float = 0.0
    done: bool = False

    def show(self, *words: str) -> None:  # the environment speaks
        self.ids += [ID[word] for word in words]
        self.mine += [0.0] * len(words)
        self.logprobs += [0.0] * len(words)

    def take(self, token: int, logprob: float = 0.0) -> None:
        """The model speaks. When it closes a block, its tool runs, or its answer is judged."""
        self.ids.append(token)
        self.mine.append(1.0)
        self.logprobs.append(logprob)
        opened, argument, closed = (WORDS[number] for number in self.ids[-3:])
        block = opened[1:-1] if closed == f"</{opened[1:]}" else ""
        if block in self.tools:
            self.show("<observation>", self.tools[block].get(argument, "unknown"), "</observation>")
        elif block == "answer":
            self.reward, self.done = float(argument == self.gold), True
        self.done |= sum(self.mine) >= LONGEST


def ask(draw: random.Random, times: int) -> list[Rollout]:
    """A group: the same new question, several times over."""
    owner = dict(zip(THINGS, draw.sample(PEOPLE, len(PEOPLE)), strict=True))
    home = dict(zip(PEOPLE, draw.sample(TOWNS, len(TOWNS)), strict=True))
    thing = draw.choice(THINGS)
    group = [Rollout({"owner": owner, "home": home}, home[owner[thing]]) for _ in range(times)]
    for rollout in group:
        rollout.show("question:", thing)
    return group


def demonstrate(draw: random.Random) -> Rollout:
    """Somebody who knows the form, but leaves out a call now and then and often does not look."""
    (shown,) = ask(draw, 1)
    read = WORDS[shown.ids[-1]]
    for block, words in BLOCKS.items():
        if block == "answer" or draw.random() < 0.8:
            said = read if draw.random() < 0.5 else draw.choice(words)
            for word in (f"<{block}>", said, f"</{block}>"):
                shown.take(ID[word])
            read = WORDS[shown.ids[-2]]  # inside the observation
    return shown


def padded(rows: list[list[Any]]) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def predict(model: LlamaForCausalLM, rollouts: list[Rollout]) -> torch.Tensor:
    """Log-probabilities [rollout, token, word]. Padding stands last, so nothing attends to it."""
    ids = padded([rollout.ids for rollout in rollouts])
    return torch.log_softmax(model(ids, use_cache=False).logits, dim=-1)


def logprobs_of(model: LlamaForCausalLM, rollouts: list[Rollout]) -> torch.Tensor:
    """[rollout, token] of what was written, but for the first token, which nothing predicts."""
    written = padded([rollout.ids for rollout in rollouts])[:, 1:]
    return predict(model, rollouts)[:, :-1].gather(2, written[:, :, None])[:, :, 0]


@torch.no_grad()
def play(model: LlamaForCausalLM, rollouts: list[Rollout]) -> None:
    """Sample word by word, all at once; `take` splices in what the tools say."""
    while active := [rollout for rollout in rollouts if not rollout.done]:
        for rollout, row in zip(active, predict(model, active), strict=True):
            chances = row[len(rollout.ids) - 1]
            token = int(torch.multinomial(chances.exp(), 1))
            rollout.take(token, float(chances[token]))


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main(seed: int = 0) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more would wait for each other: the model is that small
    draw = random.Random(seed)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), num_attention_heads=4, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(IMITATIONS):  # cross-entropy of the model's own words, not of observations
        shown = [demonstrate(draw) for _ in range(64)]
        mine = padded([rollout.mine for rollout in shown])[:, 1:]
        step(optimizer, -(logprobs_of(model, shown) * mine).sum() / mine.sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for update in range(1, UPDATES + 1):
        groups = [ask(draw, GROUP) for _ in range(QUESTIONS)]
        play(model, [rollout for group in groups for rollout in group])
        rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups])
        print(f"update {update:2}  mean reward {rewards.mean():.2f}", flush=True)
        differ = rewards.std(dim=1) > 0  # where all did equally well, there is nothing to compare
        if not differ.any():
            continue
        batch = [r for group, kept in zip(groups, differ, strict=True) if kept for r in group]
        centred = rewards[differ] - rewards[differ].mean(dim=1, keepdim=True)
        advantage = (centred / rewards[differ].std(dim=1, keepdim=True)).reshape(-1, 1)
        mine = padded([rollout.mine for rollout in batch])[:, 1:]
        old = padded([rollout.logprobs for rollout in batch])[:, 1:]
        for _ in range(PASSES):  # in the second, the model is not quite the one that sampled
            ratio = torch.exp(logprobs_of(model, batch) - old)
            bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            gain = torch.minimum(ratio * advantage, bounded * advantage)  # one for all its tokens
            step(optimizer, -(gain * mine).sum() / mine.sum())  # every token counts the same


if __name__ == "__main__":
    main()
