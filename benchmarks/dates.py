"""How well a small translator does on dates of years that it has not seen, and how long learning that takes.

It learns English dates and names in another language, made by `multihead.training.pairs`, as `multihead
train-translator` does by default, and then translates 1,000 dates kept back.

    python benchmarks/dates.py --threads 2
    python benchmarks/dates.py --to de --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import time

import torch

from multihead.models.translator import Translator
from multihead.training.loop import Trainer
from multihead.training.options import Options
from multihead.training.pairs import made_pairs
from multihead.training.parallel import Processes
from multihead.training.tokenizers import Characters
from multihead.training.translation import Codec, Translation, judge, translate_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", default="zh", help="the language, as CLDR calls it")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64, help="pairs a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(f"torch {torch.__version__}, {asked.threads} threads; English to {asked.to}; exact matches of 1,000 dates")
    print("seed  training  1 beam   4 beams  4 beams take")
    for seed in asked.seeds:
        torch.manual_seed(seed)
        pairs = made_pairs(asked.to, seed=seed)
        codec = Codec(Characters.of("\n".join(side for pair in pairs.train for side in pair)))
        model = Translator(codec.size, codec.size, 128, 2, 4, shared_embeddings=True, dropout=0.0)
        options = Options(steps=asked.steps, learning_rate=2e-3, weight_decay=0.01, seed=seed)
        task = Translation(model, pairs, codec, batch=asked.batch)
        trainer = Trainer(task, options, Processes())
        begin = time.perf_counter()
        for _ in range(asked.steps):
            trainer.advance()
        seconds = time.perf_counter() - begin

        sources = [codec.encode(source) for source, _ in pairs.test]
        longest = max(len(target) for _, target in task.train)
        shares = []
        for beams in (1, 4):
            begin = time.perf_counter()
            found = translate_texts(model, sources, beams=beams, length_penalty=0.6, longest=longest)
            shares.append(judge([codec.decode(tokens) for tokens in found], pairs.test).exact / len(found))
        took = time.perf_counter() - begin
        print(f"{seed:4}  {seconds:6.0f} s  {shares[0]:6.1%}  {shares[1]:7.1%}  {took:10.1f} s", flush=True)


if __name__ == "__main__":
    main()
