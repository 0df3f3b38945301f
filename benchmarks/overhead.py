"""What a call of `multihead.attention` costs besides the kernel, on an input so small that nothing else counts.

python benchmarks/overhead.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import multihead as mh
from multihead import reference
from multihead.kernels import sdpa
from multihead.request import make_request
from pairs import measure, show


def main() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    grad = [t.clone().requires_grad_() for t in (q, k, v)]
    print("| call | multihead.attention | the kernel alone | dispatcher | SDPA |\n|---|---|---|---|---|")
    for name, qkv, mask in (
        ("inference", (q, k, v), None),
        ("causal", (q, k, v), mh.causal()),
        ("recorded", grad, None),
    ):
        request = make_request(*qkv, mask, None, None, None, 0.0, None, None, False, reference.attention)
        whole = lambda qkv=qkv, mask=mask: mh.attention(*qkv, mask)  # noqa: E731
        alone = measure(whole, lambda request=request: sdpa.run(request), seconds=3, threads=1)
        peer = measure(
            whole,
            lambda qkv=qkv, mask=mask: F.scaled_dot_product_attention(*qkv, is_causal=mask is not None),
            seconds=3,
            threads=1,
        )
        rows = [alone.ours, alone.theirs, alone.ours - alone.theirs, peer.theirs]
        print(f"| {name} | {' | '.join(show(seconds) for seconds in rows)} |", flush=True)


if __name__ == "__main__":
    main()
