"""English to German on Multi30k (Elliott et al. 2016): a small translator, trained for a given time on the CPU.

It takes a folder with train.en-de.tsv, val.en-de.tsv and test_2016_flickr.en-de.tsv, each perhaps with "multi30k." in
front: lines of an English sentence, a tab and a German one. BLEU is sacrebleu's, of cased text as it is written.

    python benchmarks/multi30k.py FOLDER --minutes 40 --threads 2
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

from multihead.models.translator import Translator
from multihead.training.loop import Trainer
from multihead.training.options import Options
from multihead.training.pairs import Pair, Pairs, read_pairs
from multihead.training.parallel import Processes
from multihead.training.tokenizers import BytePairs
from multihead.training.translation import Codec, Translation, judge, translate_texts

TIMED = 12  # steps, to see how many there is time for
LOST = 0.03  # of the time, to validation


def read(folder: Path, part: str) -> list[Pair]:
    """The pairs of a part of the data."""
    named = folder / f"{part}.en-de.tsv"
    return read_pairs(named if named.exists() else folder / f"multi30k.{part}.en-de.tsv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the data is")
    parser.add_argument("--minutes", type=float, default=40.0, help="of training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=4000, help="of both languages together")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--decoder-layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=128, help="pairs a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--judged", type=int, default=1000, help="sentences of the test set to translate")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)

    pairs = Pairs(*(read(asked.folder, part) for part in ("train", "val", "test_2016_flickr")))
    codec = Codec(BytePairs.of("\n".join(side for pair in pairs.train for side in pair), asked.vocabulary))

    def make(steps: int) -> Trainer:
        torch.manual_seed(asked.seed)
        model = Translator(
            codec.size,
            codec.size,
            asked.width,
            asked.layers,
            asked.heads,
            decoder_layers=asked.decoder_layers,
            hidden=asked.hidden,
            dropout=asked.dropout,
            shared_embeddings=True,
        )
        task = Translation(model, pairs, codec, batch=asked.batch)
        warm_up = min(400, math.ceil(steps / 10))
        options = Options(
            steps=steps, learning_rate=asked.learning_rate, warm_up=warm_up, weight_decay=0.01, seed=asked.seed
        )
        return Trainer(task, options, Processes())

    trial = make(TIMED)
    trial.advance()  # the first is slower
    begin = time.perf_counter()
    for _ in range(1, TIMED):
        trial.advance()
    per_step = (time.perf_counter() - begin) / (TIMED - 1)
    steps = max(1, int(asked.minutes * 60 * (1 - LOST) / per_step))

    trainer = make(steps)
    parameters = sum(parameter.numel() for parameter in trainer.bare.parameters())
    print(f"torch {torch.__version__}, {asked.threads} threads; {parameters:,} parameters, {codec.size:,} tokens")
    print(f"{per_step:.2f} s a step: {steps:,} steps in {asked.minutes:g} min, each of {asked.batch} pairs")
    begin, total, weight = time.perf_counter(), 0.0, 0.0
    while trainer.done < steps and time.perf_counter() - begin < asked.minutes * 60:
        step = trainer.advance()
        total, weight = 0.98 * total + step.loss, 0.98 * weight + 1
        if trainer.done % max(1, steps // 20) == 0:
            passes = trainer.done * asked.batch / len(pairs.train)
            minutes, figures = (time.perf_counter() - begin) / 60, trainer.validate()
            print(
                f"{minutes:5.1f} min  step {trainer.done:6,}  {passes:5.1f} passes  loss {total / weight:.3f}  "
                f"validation {figures['loss']:.3f} nats per token",
                flush=True,
            )
    print(f"trained {trainer.done:,} of {steps:,} steps in {(time.perf_counter() - begin) / 60:.1f} min")

    judged = pairs.test[: asked.judged]
    sources = [codec.encode(source) for source, _ in judged]
    model = trainer.bare
    assert isinstance(model, Translator)
    for beams in (1, asked.beams):
        begin = time.perf_counter()
        found = translate_texts(model, sources, beams=beams, length_penalty=1.0, longest=60)
        translations = [codec.decode(tokens) for tokens in found]
        quality = judge(translations, judged)
        print(
            f"test_2016_flickr, {quality.pairs:,} sentences, {beams} beams: BLEU {quality.bleu:.1f} "
            f"(rule {quality.words}), chrF {quality.chrf:.1f}; {time.perf_counter() - begin:.0f} s"
        )
    for (source, target), translation in list(zip(judged, translations, strict=True))[:5]:
        print(f"\n  {source}\n  {translation}\n  ({target})")


if __name__ == "__main__":
    main()
