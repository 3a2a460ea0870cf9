"""Texts, tokenizers, images and volumes, and folders of models."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy
from fuzzing import Finding, Kind
from mutations import PICKLE, changed, damaged, odd_value, replace, spoil

from hvd_ckpt.data.images import open_images
from hvd_ckpt.data.text import CausalText
from hvd_ckpt.data.tokens import Tokens
from hvd_ckpt.data.volumes import open_volumes
from hvd_ckpt.models import catalog
from hvd_ckpt.training.config import ConfigError

TEXT = "".join(f"The {at}th line of a text, in which é and 漢字 stand.\n" for at in range(60))


class _Data(Kind):
    """What assembling a run makes of an error of the data: one line."""

    errors = (ConfigError,)

    def feed(self, draw: Random, folder: Path) -> str:
        try:
            return self.take(draw, folder)
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from None

    def take(self, draw: Random, folder: Path) -> str:
        raise NotImplementedError


def first_batch(data: Any) -> None:
    """What a run does first."""
    train, _ = data.split(0.2)
    train.batch(range(min(len(train), 3)), [0] * min(len(train), 3))


def tokenizer_json() -> dict[str, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(
        TEXT.splitlines(),
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[MASK]"], show_progress=False),
    )
    found: dict[str, Any] = json.loads(made.to_str())
    return found


class Texts(_Data):
    """Files and folders of text, of anything."""

    name = "text"
    share = 6.0

    def take(self, draw: Random, folder: Path) -> str:
        source = folder / "text"
        way = draw.randrange(4)
        if way == 0:
            source.write_text(TEXT)
            spoil(draw, source, TEXT.encode())
        elif way == 1:
            replace(draw, source, TEXT.encode())
        else:
            self._fill(draw, source)
        cache = folder / "cache"
        if draw.random() < 0.1:
            replace(draw, cache, b"")
        if way > 1 and source.is_dir() and draw.random() < 0.7:
            (source / "good.txt").write_text(TEXT)
        tokens = Tokens(
            draw.choice(
                (source, source, source, str(source) + draw.choice(("", "/", "\n", "\0", "x" * 300)))
            ),
            None,
            cache,
        )
        first_batch(CausalText(tokens, draw.choice((8, 64, 100_000)), seed=0))
        if way > 1 and b"nobody may touch" in tokens.array[:100_000].astype(numpy.uint8).tobytes():
            raise Finding("a text outside the folder was taken")
        return "accepted"

    def _fill(self, draw: Random, source: Path) -> None:
        source.mkdir()
        for at in range(draw.randrange(4)):
            file = source / draw.choice(
                ("a.txt", "b.py", "c.bin", ".hidden.txt", "d\n.md", "sub/e.txt", "é.txt")
            )
            if os.path.lexists(file):
                continue
            file.parent.mkdir(exist_ok=True)
            file.write_text(TEXT[: draw.choice((0, 50, 2000))] + str(at))
            if draw.random() < 0.6:
                content = file.read_bytes()
                file.unlink()
                replace(draw, file, damaged(draw, content))
        if draw.random() < 0.3:
            (source / "loop").symlink_to(source)


class Tokenizers(_Data):
    """JSON files that are no tokenizer, or one that numbers tokens as no model can take them."""

    name = "tokenizer"
    share = 6.0

    def prepare(self, folder: Path) -> None:
        self.tree = tokenizer_json()
        self.content = json.dumps(self.tree).encode()

    def take(self, draw: Random, folder: Path) -> str:
        text, file = folder / "text.txt", folder / "tokenizer.json"
        text.write_text(TEXT)
        file.write_bytes(self.content)
        if draw.random() < 0.6:
            tree = changed(draw, self.tree)
            if draw.random() < 0.3:
                token = draw.choice(sorted(self.tree["model"]["vocab"]))
                tree = json.loads(self.content)
                tree["model"]["vocab"][token] = draw.choice((0, 2**31, 2**32 - 1, 2**32, 2**24, -1, 500))
            file.write_text(json.dumps(tree))
        else:
            spoil(draw, file, self.content)
        if draw.random() < 0.1:
            spoil(draw, text, b"\xff" * 100)
        tokens = Tokens(text, file, folder / "cache")
        if len(tokens) and int(tokens.array.max()) >= tokens.vocabulary:
            raise Finding(f"token {tokens.array.max()} of a vocabulary of {tokens.vocabulary}")
        first_batch(CausalText(tokens, 8, seed=0))
        return "accepted"


def picture(draw: Random, kind: str = "PNG") -> bytes:
    from PIL import Image

    pixels = numpy.frombuffer(draw.randbytes(12 * 10 * 3), numpy.uint8).reshape(12, 10, 3)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def huge_png(draw: Random) -> bytes:
    """A few bytes that say they are an image of any size."""
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    side = draw.choice((0, 1 << 14, 1 << 20, (1 << 31) - 1))
    header = struct.pack(">IIBBBBB", side, side, 8, draw.choice((0, 2, 3)), 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(2000)))
        + chunk(b"IEND", b"")
    )


class ImageFolders(_Data):
    """Folders of images by class."""

    name = "image folder"
    share = 6.0

    def take(self, draw: Random, folder: Path) -> str:
        source = folder / "images"
        kinds = {
            "png": "PNG",
            "jpg": "JPEG",
            "gif": "GIF",
            "bmp": "BMP",
            "tif": "TIFF",
            "webp": "WEBP",
            "ppm": "PPM",
        }
        files = []
        for name in ("cat", "dog"):
            (source / name).mkdir(parents=True)
            for at in range(3):
                suffix = draw.choice(sorted(kinds))
                files.append(source / name / f"{at}.{suffix}")
                files[-1].write_bytes(picture(draw, kinds[suffix]))
        for _ in range(draw.choice((1, 2))):
            self._spoil(draw, source, draw.choice(files))
        data = open_images(source, 8)
        data.batch(range(len(data)), [0] * len(data))
        first_batch(data)
        return "accepted"

    def _spoil(self, draw: Random, source: Path, file: Path) -> None:
        way = draw.randrange(6)
        if way == 0 and file.is_file() and not file.is_symlink():
            file.write_bytes(huge_png(draw))
        elif way == 1 and file.parent.is_dir() and not file.parent.is_symlink():
            shutil.rmtree(file.parent)
            replace(draw, file.parent, b"")
        elif way == 2:
            (source / "loop").unlink(missing_ok=True)
            (source / "loop").symlink_to(draw.choice((source, source.parent.parent / "outside", "cat")))
        elif file.is_file() and not file.is_symlink():
            spoil(draw, file, picture(draw))


def npy(draw: Random, array: Any, odd: bool) -> bytes:
    """An array file; an odd one may have a header that says something else."""
    stream = io.BytesIO()
    numpy.save(stream, array, allow_pickle=True)
    content = stream.getvalue()
    if not odd or draw.random() < 0.3:
        return content
    length = int.from_bytes(content[8:10], "little")
    header = draw.choice(
        (
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2000000000,), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
            "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
            "{'descr': '|V8', 'fortran_order': True, 'shape': (1,), }",
            "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }",
            "{'descr': '<m8', 'fortran_order': False, 'shape': (4,), }",
            "{'descr': '<f4', 'shape': (4,), }",
            "__import__('os').system('true')",
            "{" * 200,
            "(" * 5000,
            "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 70 + "), }",
            "{'descr': '<f2', 'fortran_order': False, 'shape': (4, 0, 3, 3), }",
        )
    )
    text = header.encode().ljust(118) + b"\n"
    return content[:8] + len(text).to_bytes(2, "little") + text + content[10 + length :]


class _Arrays(_Data):
    array: str
    opener: Callable[[Path, int], Any]

    def arrays(self, draw: Random) -> dict[str, Any]:
        raise NotImplementedError

    def take(self, draw: Random, folder: Path) -> str:
        file = folder / "data.npz"
        arrays = self.arrays(draw)
        name = draw.choice((self.array, "labels"))
        way = draw.randrange(5)
        if way == 0:
            arrays[name] = draw.choice(
                (
                    numpy.zeros((3, 0)),
                    numpy.array(3),
                    numpy.array([None, {}], object),
                    numpy.array(["a", "b"]),
                    numpy.zeros(4, complex),
                    numpy.full((6,), 2**62),
                    numpy.full((6, 5, 5), numpy.nan),
                    numpy.full((6, 5, 5), 1e300),
                    numpy.full((6,), -1),
                    numpy.zeros((6, 5, 5), "M8[s]"),
                    numpy.zeros((6, 5, 5), bool),
                    numpy.zeros((6, 5, 5), numpy.float16),
                    numpy.zeros((6, 5, 5), numpy.longdouble),
                    numpy.zeros((6, 1, 1, 1)),
                    numpy.zeros((6, 5, 5, 5), numpy.uint64) + 2**63,
                    numpy.zeros((6,) + (1,) * 20),
                    numpy.array(odd_value(draw), object),
                )
            )
        elif way == 1:
            del arrays[name]
        kind = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
        with zipfile.ZipFile(file, "w", kind) as archive:
            for key, array in arrays.items():
                content = npy(draw, array, odd=way == 2 and key == name)
                if way == 3 and key == name:
                    content = draw.choice((PICKLE, b"", b"x" * 100, damaged(draw, content)))
                archive.writestr(key + draw.choice((".npy",) * 15 + ("",)), content)
        if way == 4 or draw.random() < 0.1:
            spoil(draw, file, PICKLE)
        data = self.opener(file, 8)
        if data.classes > 1 << 20:
            raise Finding(f"{data.classes} classes")
        first_batch(data)
        return "accepted"


class ImageArrayFiles(_Arrays):
    """Arrays of images."""

    name = "image arrays"
    share = 5.0
    array = "images"
    opener = staticmethod(open_images)

    def arrays(self, draw: Random) -> dict[str, Any]:
        return {
            "images": numpy.frombuffer(draw.randbytes(150), numpy.uint8).reshape(6, 5, 5),
            "labels": numpy.arange(6) % 3,
        }


class VolumeFiles(_Arrays):
    """Arrays of volumes."""

    name = "volume arrays"
    share = 4.0
    array = "volumes"
    opener = staticmethod(open_volumes)

    def arrays(self, draw: Random) -> dict[str, Any]:
        volumes = numpy.frombuffer(draw.randbytes(750), numpy.uint8).reshape(6, 5, 5, 5)
        return {"volumes": volumes, "labels": volumes % 2}


class Models(_Data):
    """Folders of Hugging Face models."""

    name = "model folder"
    share = 4.0

    def prepare(self, folder: Path) -> None:
        from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        small = {
            "vocab_size": 20,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        }
        BertForMaskedLM(BertConfig(**small, max_position_embeddings=16)).save_pretrained(folder / "bert")
        GPT2LMHeadModel(
            GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16)
        ).save_pretrained(folder / "gpt2")
        self.folders = [folder / "bert", folder / "gpt2"]
        for one in self.folders:
            catalog.find(str(one)).build({})

    def take(self, draw: Random, folder: Path) -> str:
        place = Path(shutil.copytree(draw.choice(self.folders), folder / "model"))
        config, weights = place / "config.json", place / "model.safetensors"
        content = weights.read_bytes()
        for _ in range(draw.choice((1, 1, 2))):
            way = draw.randrange(7)
            if way < 2 and config.is_file():
                tree = changed(
                    draw,
                    json.loads(config.read_bytes())
                    if way
                    else json.loads((self.folders[0] / "config.json").read_bytes()),
                )
                config.unlink()
                config.write_text(json.dumps(tree))
            elif way == 2 and weights.is_file():
                spoil(draw, weights, PICKLE)
            elif way == 3:
                (place / "pytorch_model.bin").write_bytes(PICKLE)
                if draw.random() < 0.7:
                    weights.unlink(missing_ok=True) if not weights.is_dir() else None
            elif way == 4:
                extra = {
                    "auto_map": {"AutoModel": "evil.Model"},
                    "_attn_implementation": "evil/kernel",
                    "attn_implementation": "evil/kernel",
                }
                if config.is_file():
                    config.write_text(
                        json.dumps(
                            {
                                **json.loads(
                                    content
                                    if config.is_dir()
                                    else (self.folders[1] / "config.json").read_bytes()
                                ),
                                **extra,
                            }
                        )
                    )
                (place / "evil.py").write_text("import os\nos.system('true')\n")
            elif way == 5:
                index = {
                    "weight_map": draw.choice(
                        (
                            {"a": "../../outside/x.safetensors"},
                            {"a": "pytorch_model.bin"},
                            {"a": 1},
                            [],
                            {"a": "model.safetensors"},
                        )
                    )
                }
                (place / "model.safetensors.index.json").write_text(json.dumps(index))
            elif config.is_file():
                spoil(draw, config, PICKLE)
        if config.is_file() and config.stat().st_size > 1 << 21 and draw.random() < 0.5:
            config.unlink()
        entry = catalog.find(str(place))
        catalog.limits(entry.build({}))
        return "accepted"


KINDS: tuple[type[Kind], ...] = (
    Texts,
    Tokenizers,
    ImageFolders,
    ImageArrayFiles,
    VolumeFiles,
    Models,
)
