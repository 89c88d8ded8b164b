"""Two real processes with a gloo group between them, started once and given one function after another to run."""

import multiprocessing
import os
import time
import traceback

import torch
from torch import distributed as dist

PATIENCE = 150  # seconds; a rank that waits for the other for ever fails the test


def serve(rank, folder, pipe):
    torch.set_num_threads(1)
    # What torchrun would set; accelerate and Lightning read it.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send((True, function(rank, **arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class TwoRanks:
    def __init__(self, make_folder):
        self._make_folder = make_folder
        self._workers = []

    def run(self, function, **arguments):
        """``[function(0, **arguments), function(1, **arguments)]``, each computed by its own rank."""
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, arguments))
        answers, deadline = {}, time.monotonic() + PATIENCE
        while len(answers) < len(self._workers) and time.monotonic() < deadline:
            for rank, (_, pipe) in enumerate(self._workers):
                if rank not in answers and pipe.poll(0.01):
                    answers[rank] = pipe.recv()
                    if not answers[rank][0]:  # the other one may wait for this one for ever
                        deadline = min(deadline, time.monotonic() + 5)
        failed = [f"rank {rank}:\n{answer}" for rank, (fine, answer) in sorted(answers.items()) if not fine]
        silent = [f"rank {rank} did not answer" for rank in range(len(self._workers)) if rank not in answers]
        if failed or silent:
            self.stop()
            raise AssertionError("\n".join(failed + silent))
        return [answers[rank][1] for rank in sorted(answers)]

    def _start(self):
        context = multiprocessing.get_context("spawn")
        folder = self._make_folder()
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, folder, theirs), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def stop(self):
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []
