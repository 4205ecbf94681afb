"""A plain training loop with DistributedDataParallel: the sequence is sharded over all ranks.

torchrun --nproc-per-node 4 plain_pytorch.py
"""

import tiny
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from longhaul_attention import ContextParallel, register_transformers


def main() -> None:
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, method="ring")
    model = tiny.model(register_transformers())
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The same on all ranks; each keeps its tokens.
    batch = tiny.packed(tiny.documents())
    with tiny.recorded(model) as proof:
        for step in range(3):
            loss = replicated(**cp.shard_batch(batch)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 0:
                proof.loss = tiny.mean_over_ranks(loss)
    proof.check("plain PyTorch", batch)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
