"""Makes the pictures of docs/inspection.md, and prints the numbers that it quotes. By the public interface alone.

    python docs/pictures/inspection.py words words.txt
    multihead train --text words.txt --chars --layers 2 --context 128 --steps 1500 --dropout 0 --threads 1 \
        --out runs/words
    multihead train --text tinyshakespeare.txt --chars --context 128 --steps 2000 --dropout 0 --threads 1 \
        --out runs/shakespeare

    python docs/pictures/inspection.py induction runs/words runs/shakespeare
    python docs/pictures/inspection.py sink runs/words runs/shakespeare
    python docs/pictures/inspection.py collapse tinyshakespeare.txt

Numbers are of each run, pictures of the first. They are written beside this file unless --out says where else.
"""

from __future__ import annotations

import argparse
import random
from contextlib import ExitStack
from pathlib import Path
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead.inspection import pictures
from multihead.models.gpt import GPT, loss_of
from multihead.training.tokenizers import tokenizer_from

LENGTH = 16  # of a random word that is read twice
PROMPT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:"


def words(path: Path, lines: int = 20_000) -> None:
    """A text to learn copying from: each line is a random word, twice. No letter comes twice in a word, so what came
    after a letter before is what comes next; and no word comes again, so there is nothing to learn by heart."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(lines):
            word = "".join(draw.sample(ascii_letters, draw.randint(10, 40)))
            file.write(f"{word}{word}\n")


def opened(run: Path) -> tuple[GPT, Any]:
    """The model and the tokenizer of a run of `multihead train`."""
    return GPT.load(run / "model.safetensors").eval(), tokenizer_from(run / "tokenizer.json")


# An induction head ----------------------------------------------------------------------------------------------------


def repeated(tokenizer: Any, rows: int = 64) -> Tensor:
    """Random letters, twice, (rows, 2 LENGTH): what comes is only to be known from what came."""
    letters = torch.tensor(tokenizer.encode(ascii_letters))
    generator = torch.Generator().manual_seed(0)
    once = [letters[torch.randperm(len(letters), generator=generator)[:LENGTH]] for _ in range(rows)]
    return torch.stack(once).repeat(1, 2)


@torch.no_grad()
def guessed(model: GPT, tokens: Tensor, without: tuple[str, int, str] | None = None) -> tuple[float, float]:
    """How often the likeliest letter is the next one, the first time and the second.

    Args:
        model: guesses.
        tokens: as `repeated` gives them.
        without: a layer, its head that is taken out, and what its output is replaced by, "zero" or "mean": its own over
            all tokens, so that what is the same for all of them stays.
    """

    def replace(_: Any, given: tuple[Tensor]) -> tuple[Tensor]:  # what comes in at the layer's last projection
        parts = list(given[0].chunk(model.config["heads"], -1))
        mean = parts[head].mean((0, 1), keepdim=True) if by == "mean" else torch.zeros(())
        parts[head] = mean.expand_as(parts[head])
        return (torch.cat(parts, -1),)

    with ExitStack() as stack:
        if without is not None:
            layer, head, by = without
            stack.enter_context(model.get_submodule(layer).out_proj.register_forward_pre_hook(replace))
        right = (model(tokens)[:, :-1].argmax(-1) == tokens[:, 1:]).float()
    return right[:, : LENGTH - 1].mean().item(), right[:, LENGTH:].mean().item()


def letters_of(tokenizer: Any, tokens: Tensor) -> list[str]:
    """Names of tokens (T,)."""
    return [tokenizer.spell(token).decode() for token in tokens.tolist()]


def induction(runs: list[Path], out: Path) -> None:
    """How much each head follows the pattern, and the maps of the best and of the worst of its layer."""
    for run in runs:
        model, tokenizer = opened(run)
        tokens = repeated(tokenizer)
        with mh.capture(model) as rec:
            first, second = guessed(model, tokens)
        print(f"{run.name}: the next letter is guessed in {first:.0%} the first time, {second:.0%} the second")
        scores = {name: record.pattern("induction", tokens).mean(0) for name, record in rec.items()}
        for name, record in rec.items():
            others = record.pattern("previous").mean(0), record.pattern("duplicate", tokens).mean(0)
            print(f"  {name}  induction {told(scores[name])}  previous {told(others[0])}  duplicate {told(others[1])}")
            print(
                f"  {'':{len(name)}}  entropy / ln of the keys {told(record.entropy(normalized=True).nanmean((0, 2)))}"
            )
        if run == runs[0]:
            for by, called in (("mean", "its mean"), ("zero", "zeros")):
                print(f"  guessed the second time with {called} in place of one head's output:")
                for name, found in scores.items():
                    said = (f"{guessed(model, tokens, (name, head, by))[1]:.0%}" for head in range(len(found)))
                    print(f"  {name}  {', '.join(said)}")
            best = max(scores, key=lambda name: float(scores[name].max()))
            figure, axes = side_by_side(2, 8.8, 4.4)
            for ax, head in zip(axes, (int(scores[best].argmax()), int(scores[best].argmin())), strict=True):
                names = letters_of(tokenizer, tokens[0])
                pictures.plot_map(rec[best], head, tokens=names, ax=ax, colorbar=ax is axes[-1])
                ax.set_title(f"{best}, head {head}: induction {scores[best][head]:.2f}", fontsize="medium")
            save(figure, out / "induction.png")


# A sink ---------------------------------------------------------------------------------------------------------------


def sink(runs: list[Path], out: Path) -> None:
    """The weight of each head on the first token, the map of the head that has most there, and what keys receive."""
    for run in runs:
        model, tokenizer = opened(run)
        verse = set(PROMPT) <= set(letters_of(tokenizer, torch.arange(tokenizer.size)))
        tokens = torch.tensor([tokenizer.encode(PROMPT)]) if verse else repeated(tokenizer)
        with torch.no_grad(), mh.capture(model) as rec:
            model(tokens)
        print(f"{run.name}, {'a verse' if verse else 'random letters, twice'}: {tokens.shape[1]} tokens")
        masses = {name: record.mass(0).mean((0, 2)) for name, record in rec.items()}
        for name, record in rec.items():
            norms = record.v.norm(dim=-1).mean(0)  # (H, S)
            beside = norms[:, 0] / norms[:, 1:].mean(-1)
            print(
                f"  {name}  on the first token {told(masses[name])}  length of its value beside others' {told(beside)}"
            )
        if run == runs[0]:
            best = max(masses, key=lambda name: float(masses[name].max()))
            head = int(masses[best].argmax())
            figure, (left, right) = side_by_side(2, 8.8, 4.0)
            pictures.plot_map(rec[best], head, tokens=letters_of(tokenizer, tokens[0]), ax=left)
            left.set_title(f"{best}, head {head}: {masses[best][head]:.2f} on the first token", fontsize="medium")
            pictures.plot_received(rec[best], ax=right)
            right.set_title(f"{best}", fontsize="medium")
            save(figure, out / "sink.png")


# A collapse -----------------------------------------------------------------------------------------------------------


def train(text: str, rate: float, steps: int = 150) -> dict[str, list[float]]:
    """A small GPT's loss, normalised entropy and largest logit at each step."""
    torch.manual_seed(0)
    vocabulary = sorted(set(text))
    tokens = torch.tensor([vocabulary.index(character) for character in text])
    model = GPT(len(vocabulary), 64, 2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    log: dict[str, list[float]] = {"loss": [], "entropy": [], "logit": []}
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens) - 64, (16, 1)) + torch.arange(65)]
        with mh.capture(model, stats=("entropy", "visible_keys", "max_logit")) as rec:
            loss = loss_of(model, batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log["loss"].append(loss.item())
        log["entropy"].append(min(record.entropy(normalized=True).nanmean().item() for record in rec.values()))
        log["logit"].append(max(record.max_logit().max().item() for record in rec.values()))
    return log


def collapse(text: Path, out: Path) -> None:
    """Two trainings that differ in the learning rate."""
    read = text.read_text(encoding="utf-8")[:300_000]
    figure, axes = side_by_side(3, 8.6, 2.7)
    labels = {"entropy": "entropy / ln of the visible keys", "logit": "largest logit", "loss": "loss, nats"}
    for rate, color in ((1e-3, "tab:blue"), (1e-1, "tab:red")):
        log = train(read, rate)
        for ax, name in zip(axes, labels, strict=True):
            ax.plot(log[name], color=color, label=f"rate {rate:g}")
        at = {step: ", ".join(f"{name} {log[name][step - 1]:.3g}" for name in labels) for step in (1, 10, 50, 150)}
        print(f"learning rate {rate:g}:", *(f"  step {step}: {said}" for step, said in at.items()), sep="\n")
    for ax, label in zip(axes, labels.values(), strict=True):
        ax.set_title(label, fontsize="medium")
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[0].legend(frameon=False)
    axes[1].set_yscale("log")
    save(figure, out / "collapse.png")


# All of them ----------------------------------------------------------------------------------------------------------


def told(numbers: Tensor) -> str:
    """Of the heads."""
    return " ".join(f"{number:.2f}" for number in numbers.tolist())


def side_by_side(count: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure with panels in a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, count)


def save(figure: Any, path: Path) -> None:
    """As PNG, small."""
    figure.savefig(path, dpi=100)
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("words", "induction", "sink", "collapse"))
    parser.add_argument("paths", nargs="+", type=Path, help="The text to write, the runs, or the text to learn.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="The folder for pictures.")
    given = parser.parse_args()
    if given.what == "words":
        words(given.paths[0])
    elif given.what == "collapse":
        collapse(given.paths[0], given.out)
    else:
        {"induction": induction, "sink": sink}[given.what](given.paths, given.out)


if __name__ == "__main__":
    main()
