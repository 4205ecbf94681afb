"""A loop of accelerate's: two data-parallel groups of two ranks that share a sequence.

torchrun --nproc-per-node 4 accelerate_loop.py
"""

import tiny
import torch
from accelerate import Accelerator
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from longhaul_attention import ContextParallel, parallelize, register_transformers, share_batches


def main() -> None:
    accelerator = Accelerator(cpu=True)
    ranks = accelerator.num_processes
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], method="ulysses")
    # Two sequences with as many targets each: the mean of their losses is that of all tokens.
    sequences = [tiny.packed(tiny.documents()), tiny.packed(tiny.documents()[::-1])]
    loader = share_batches(DataLoader(sequences, collate_fn=lambda rows: rows[0]), cp)
    model = parallelize(tiny.model(register_transformers()), cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replicated, prepared = accelerator.prepare(model, optimizer)
    with tiny.recorded(model) as proof:
        for batch in loader:
            loss = replicated(**batch).loss
            accelerator.backward(loss)
            prepared.step()
            prepared.zero_grad()
            proof.loss = float(accelerator.gather(loss.detach()).mean())
    both = {key: torch.cat([sequence[key] for sequence in sequences]) for key in sequences[0]}
    proof.check("accelerate", both)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
