"""Texts, tokenizers, images and volumes, and folders of models."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from hostile import PICKLE, Draw
from watch import Feed, Finding, Kind

from hvd_ckpt.app.datasets.images import open_images
from hvd_ckpt.app.datasets.text import CausalText
from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.app.datasets.volumes import open_volumes
from hvd_ckpt.app.models import catalog
from hvd_ckpt.app.training.config import ConfigError, config_errors

TEXT = "".join(f"The {at}th line of a text, in which é and 漢字 stand.\n" for at in range(60))


def first_batch(data: Any) -> None:
    train, _ = data.split(0.2)
    train.batch(range(min(len(train), 3)), [0] * min(len(train), 3))


def texts(draw: Draw, folder: Path) -> None:
    """Files and folders of text, of anything."""
    source, cache, way = folder / "text", folder / "cache", draw.below(4)
    if way == 0:
        source.write_text(TEXT)
        draw.spoil(source, TEXT.encode())
    elif way == 1:
        draw.replace(source, TEXT.encode())
    else:
        fill(draw, source)
    if draw.chance(0.1):
        draw.replace(cache, b"")
    odd_name = str(source) + draw.choice("", "/", "\n", "\0", "x" * 300)
    tokens = Tokens(draw.choice(source, source, source, odd_name), None, cache)
    first_batch(CausalText(tokens, draw.choice(8, 64, 100_000), seed=0))
    if way > 1 and b"nobody may touch" in tokens.array[:100_000].astype(numpy.uint8).tobytes():
        raise Finding("a text outside the folder was taken")


def fill(draw: Draw, source: Path) -> None:
    """Makes a folder of texts, some of which are none."""
    source.mkdir()
    for name in ("a.txt", "b.py", ".hidden.txt", "d\n.md", "sub/e.txt", "é.txt")[: draw.below(7)]:
        file = source / name
        file.parent.mkdir(exist_ok=True)
        content = TEXT[: draw.choice(0, 50, 2000)].encode()
        if draw.chance(0.5):
            draw.replace(file, draw.damaged(content))
        else:
            file.write_bytes(content)
    if draw.chance(0.3):
        (source / "loop").symlink_to(source)


def tokenizers(_: Path) -> Feed:
    """JSON files that are not a tokenizer, or one that numbers tokens as no model can take them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    made.train_from_iterator(TEXT.splitlines(), trainer)
    good = json.loads(made.to_str())

    def feed(draw: Draw, folder: Path) -> None:
        text, file = folder / "text.txt", folder / "tokenizer.json"
        text.write_text(TEXT)
        file.write_text(json.dumps(good))
        way, words = draw.below(3), {**good["model"]["vocab"]}
        if way == 0:
            file.write_text(json.dumps(draw.changed(good)))
        elif way == 1:
            words[draw.choice(*sorted(words))] = draw.choice(0, 2**31, 2**32 - 1, 2**32, 2**24, -1, 500)
            file.write_text(json.dumps({**good, "model": {**good["model"], "vocab": words}}))
        else:
            draw.spoil(file, PICKLE)
        tokens = Tokens(text, file, folder / "cache")
        if len(tokens) and int(tokens.array.max()) >= tokens.vocabulary:
            raise Finding(f"token {tokens.array.max()} of a vocabulary of {tokens.vocabulary}")
        first_batch(CausalText(tokens, 8, seed=0))

    return feed


def huge_png(draw: Draw) -> bytes:
    """A few bytes that say they are an image of any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    side = draw.choice(0, 1 << 14, 1 << 20, (1 << 31) - 1)
    header = struct.pack(">IIBBBBB", side, side, 8, draw.choice(0, 2, 3), 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(2000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def image_folders(_: Path) -> Feed:
    """Folders of images by class."""
    from PIL import Image

    image = Image.fromarray(numpy.arange(360, dtype=numpy.uint8).reshape(12, 10, 3))
    pictures = {}
    for ending in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"):
        image.save(stream := io.BytesIO(), ending)
        pictures[ending] = stream.getvalue()

    def feed(draw: Draw, folder: Path) -> None:
        source, files = folder / "images", []
        for name in ("cat", "dog"):
            (source / name).mkdir(parents=True)
            for at in range(2):
                ending = draw.choice(*pictures)
                files.append(source / name / f"{at}.{ending}")
                files[-1].write_bytes(pictures[ending])
        for _ in range(draw.choice(1, 2)):
            spoil(draw, source, draw.choice(*files))
        data = open_images(source, 8)
        data.batch(range(len(data)), [0] * len(data))
        first_batch(data)

    def spoil(draw: Draw, source: Path, file: Path) -> None:
        way, plain = draw.below(6), file.is_file() and not file.is_symlink()
        if way == 0 and plain:
            file.write_bytes(huge_png(draw))
        elif way == 1:
            draw.replace(file.parent, b"")
        elif way == 2:
            (source / "loop").unlink(missing_ok=True)
            (source / "loop").symlink_to(draw.choice(source, source.parent.parent / "outside", "cat"))
        elif plain:
            draw.spoil(file, pictures["png"])

    return feed


ODD_HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
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
ODD_ARRAYS = (
    numpy.zeros((3, 0)), numpy.array(3), numpy.array([None, {}], object), numpy.array(["a", "b"]), numpy.zeros(4, complex),
    numpy.full((6,), 2**62), numpy.full((6, 5, 5), numpy.nan), numpy.full((6, 5, 5), 1e300), numpy.full((6,), -1),
    numpy.zeros((6, 5, 5), "M8[s]"), numpy.zeros((6, 5, 5), bool), numpy.zeros((6, 5, 5), numpy.longdouble),
    numpy.zeros((6, 5, 5, 5), numpy.uint64) + 2**63, numpy.zeros((6,) + (1,) * 20),
)  # fmt: skip


def npy(array: Any, header: str | None = None) -> bytes:
    """An array file, perhaps with a header that says something else."""
    numpy.save(stream := io.BytesIO(), array, allow_pickle=True)
    content = stream.getvalue()
    if header is None:
        return content
    length = int.from_bytes(content[8:10], "little")
    text = header.encode().ljust(118) + b"\n"
    return content[:8] + len(text).to_bytes(2, "little") + text + content[10 + length :]


def arrays(opener: Callable[[Path, int], Any], **good: Any) -> Callable[[Path], Feed]:
    """Archives of arrays, of anything."""

    def feed(draw: Draw, folder: Path) -> None:
        file, contents = folder / "data.npz", {name: npy(array) for name, array in good.items()}
        name, way = draw.choice(*contents), draw.below(5)
        if way == 0:
            contents[name] = npy(draw.choice(*ODD_ARRAYS))
        elif way == 1:
            del contents[name]
        elif way == 2:
            contents[name] = npy(good[name], draw.choice(*ODD_HEADERS))
        elif way == 3:
            contents[name] = draw.choice(PICKLE, b"", b"x" * 100, draw.damaged(contents[name]))
        kind = draw.choice(zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)
        with zipfile.ZipFile(file, "w", kind) as archive:
            for key, content in contents.items():
                archive.writestr(f"{key}.npy", content)
        if way == 4:
            draw.spoil(file, PICKLE)
        data = opener(file, 8)
        if data.classes > 1 << 20:
            raise Finding(f"{data.classes} classes")
        first_batch(data)

    return lambda _: feed


def model_folders(folder: Path) -> Feed:
    """Folders of Hugging Face models."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    good = [folder / name for name in ("bert", "gpt2")]
    for one in good:
        sizes = {"width": 8, "heads": 2, "layers": 1}
        model: Any = catalog.find(f"{one.name}-tiny").build({"vocabulary": 20, "length": 16}, sizes)
        model.transformers_model.save_pretrained(one)
        catalog.find(str(one)).build({})

    def feed(draw: Draw, folder: Path) -> None:
        place = Path(shutil.copytree(draw.choice(*good), folder / "model"))
        config, weights = place / "config.json", place / "model.safetensors"
        values = json.loads(config.read_bytes())
        for way in (draw.below(7) for _ in range(draw.choice(1, 1, 2))):
            if way < 2 and config.is_file():
                config.unlink()
                config.write_text(json.dumps(draw.changed(values)))
            elif way == 2:
                draw.spoil(weights, PICKLE)
            elif way == 3:
                (place / "pytorch_model.bin").write_bytes(PICKLE)
                if weights.is_file() and draw.chance(0.7):
                    weights.unlink()
            elif way == 4 and config.is_file():
                kernel = dict.fromkeys(("_attn_implementation", "attn_implementation"), "evil/kernel")
                config.write_text(json.dumps({**values, "auto_map": {"AutoModel": "evil.Model"}, **kernel}))
                (place / "evil.py").write_text("import os\nos.system('true')\n")
            elif way == 5:
                files = draw.choice("../../outside/x.safetensors", "pytorch_model.bin", 1, None)
                names = {"a": files} if files else []
                (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
            else:
                draw.spoil(config, PICKLE)
        if os.path.lexists(config) and config.is_file() and config.stat().st_size > 1 << 21:
            config.unlink()
        catalog.limits(catalog.find(str(place)).build({}))

    return feed


def as_a_run(prepare: Callable[[Path], Feed], folder: Path) -> Any:
    """A run turns errors of its data into one line."""
    return config_errors(OSError)(prepare(folder))


IMAGES = numpy.arange(150, dtype=numpy.uint8).reshape(6, 5, 5)
VOLUMES = numpy.arange(750).astype(numpy.uint8).reshape(6, 5, 5, 5)
PREPARED: dict[str, Callable[[Path], Feed]] = {
    "text": lambda _: texts,
    "tokenizer": tokenizers,
    "image folder": image_folders,
    "image arrays": arrays(open_images, images=IMAGES, labels=numpy.arange(6) % 3),
    "volume arrays": arrays(open_volumes, volumes=VOLUMES, labels=VOLUMES % 2),
    "model folder": model_folders,
}
KINDS = tuple(
    Kind(name, (ConfigError,), functools.partial(as_a_run, prepare)) for name, prepare in PREPARED.items()
)
