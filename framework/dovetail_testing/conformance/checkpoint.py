"""What every format of checkpoints must do: claim its own files alone, give their tensors, and believe no file."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dovetail.checkpoint.formats import Format, Formats
from dovetail.contracts.checkpoint import CheckpointFormat, Listing
from dovetail.contracts.errors import ModelError
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail_testing.checks import check, fail, raised
from dovetail_testing.conformance.base import Conformance

MAX_BYTES = 64 << 20
"""Of memory for a file of a few kilobytes, whatever it claims."""
HEAD = 512
"""Bytes at the beginning of a file, each eight of which are overwritten by numbers that lie."""
LIES = (1 << 30, 1 << 62, (1 << 64) - 1, 0)


class CheckpointConformance(Conformance):
    """What every format of checkpoints must do.

    Attributes:
        place: Name of the file in the folder that is given as the path; "": the folder.
        num_broken: Files of random wrong bytes that are read.
        seed: Of these.
    """

    kind = "checkpoint"
    place: ClassVar[str] = ""
    num_broken: ClassVar[int] = 100
    seed: ClassVar[int] = 7

    def write(self, folder: Path) -> Mapping[str, Tensor]:
        """Override: write a small checkpoint into an empty folder; return its tensors as they have to be read."""
        pytest.skip("no checkpoint is given: override write()")

    def _model(self, path: Path) -> ModelFolder:
        formats = Formats(lambda name: [Format(str(self.name), self.plugin())])
        return ModelFolder(path / self.place, formats=formats)

    def _written(self, folder: Path) -> Mapping[str, Tensor]:
        if self.plugin().is_filled:
            pytest.skip("it reads no files")
        return self.write(folder)

    def test_it_is_asked_before_torch_is_there(self) -> None:
        """Importing its module imports no torch: a start asks it first."""
        module = self.plugin().__module__
        self._child()
        code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; sys.exit('torch' in sys.modules)"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        check(found.returncode == 0, f"importing {module} imports torch; import it where a tensor is made")

    def test_it_claims_its_own_alone(self, tmp_path: Path) -> None:
        """It names files that are there of its own checkpoint, and none of an empty folder or another format's."""
        cls: type[CheckpointFormat] = self.plugin()
        (tmp_path / "other").mkdir()
        others = [Listing(tmp_path / "other", ()), Listing(tmp_path / "other", ("config.json", "model.safetensors"))]
        (tmp_path / "other" / "notes.txt").write_text("hello")
        for listing in (*others, Listing(tmp_path / "other", ("notes.txt",), is_file=True)):
            check(not cls.claims(listing), f"it claims {list(listing.names)}, which nobody has written for it")
        (tmp_path / "own").mkdir()
        self._written(tmp_path / "own")
        stored = self._model(tmp_path / "own").stored
        if stored is None:
            fail("it does not claim what write() wrote")
        check(all(file.is_file() for file in stored.files), "it claims files that are not there")

    def test_tensors_are_as_written(self, tmp_path: Path) -> None:
        """Every tensor that was written is there once, and is read bit by bit; the configuration fits them."""
        wanted = self._written(tmp_path)
        model = self._model(tmp_path)
        model.check()
        before = [file.read_bytes() for file in model.stored.files] if model.stored is not None else []
        with Checkpoint.of_folder(model) as checkpoint:
            names = sorted(header.name for header in checkpoint.headers)
            check(names == sorted(wanted), f"headers name {names[:8]}, and {sorted(wanted)[:8]} were written")
            for name, tensor in wanted.items():
                read = checkpoint.read(name)
                same = read.dtype == tensor.dtype and torch.equal(read, tensor)
                check(same, f"{name} is read as another tensor: {tuple(read.shape)}, {read.dtype}")
                checkpoint.release([name])
        after = [file.read_bytes() for file in model.stored.files] if model.stored is not None else []
        check(before == after, "reading changes its files")

    def test_a_broken_file_is_read_or_refused(self, tmp_path: Path) -> None:
        """Files that are cut, lie about sizes or hold wrong bytes give a `ModelError` or tensors, in little memory."""
        self._written(tmp_path)
        stored = self._model(tmp_path).stored
        if stored is None:
            fail("it does not claim what write() wrote")
        for file in stored.files:
            whole = file.read_bytes()
            for what, data in broken(whole, self.num_broken, self.seed):
                file.write_bytes(data)
                self._read_or_refuse(tmp_path, f"{file.name} {what}")
            file.write_bytes(whole)

    def _read_or_refuse(self, path: Path, what: str) -> None:
        tracemalloc.start()
        try:
            model = self._model(path)
            model.check()
            with Checkpoint.of_folder(model) as checkpoint:
                for header in checkpoint.headers:
                    checkpoint.read(header.name)
            _ = model.texts
        except ModelError:
            pass
        except ValueError as error:
            check("without weights" in str(error), f"{what}: it raised {raised(error)} instead of a ModelError")
        except Exception as error:  # a stranger's code; the message says what it did
            fail(f"{what}: it raised {raised(error)} instead of a ModelError that names the file")
        finally:
            taken = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        check(taken < MAX_BYTES, f"{what}: reading it took {taken:,} bytes; allocate nothing that a file only claims")

    def test_it_fills_alike_and_finite(self) -> None:
        """What makes weights up makes the same ones of equal generators, all finite, and no file is its own."""
        cls = self.plugin()
        if not cls.is_filled:
            pytest.skip("it reads files")
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int32):
            made = [torch.zeros(4, 8, dtype=dtype) for _ in range(2)]
            for tensor in made:
                cls(()).fill("model.embed_tokens.weight", tensor, torch.Generator().manual_seed(self.seed))
            check(torch.equal(*made), f"equal generators give other weights in {dtype}")
            check(bool(made[0].float().isfinite().all()), f"weights in {dtype} are not finite")
            check(len(set(made[0].flatten().tolist())) > 1, f"all weights in {dtype} are alike")


def broken(whole: bytes, num: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield (what is wrong, bytes) of a file: cut, lying, and with wrong bytes at random."""
    rng = random.Random(seed)
    for end in sorted({rng.randrange(1, len(whole)) for _ in range(20)}):
        yield f"cut at byte {end}", whole[:end]
    for at in range(0, min(HEAD, len(whole) - 8), 8):
        for lie in LIES:
            yield f"with {lie:,} at byte {at}", whole[:at] + lie.to_bytes(8, "little") + whole[at + 8 :]
    for number in range(num):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(len(data) if number % 2 else min(len(data), 4096))] = rng.randrange(256)
        yield f"with wrong bytes ({number})", bytes(data)
