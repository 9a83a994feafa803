"""Text for longer runs that every machine can rebuild: the sources of Linux, as tokens.

    apt-get download linux-source-6.1
    python examples/kernel_text.py linux-source-6.1_*_all.deb runs/kernel_text

writes ``tokenizer.json`` (byte-level BPE) and ``tokens.xz``: the tokens of the held-out files, and
of the other files in a fixed shuffled order. ``load`` reads them; no file is read twice.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import subprocess
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PACKAGE = (
    "http://deb.debian.org/debian-security/pool/updates/main/l/linux/"
    "linux-source-6.1_6.1.192-2_all.deb"
)
"""The version that the runs of docs/evidence.md read; others have slightly other text."""

VOCAB = 16_384
HELDOUT_ONE_IN = 100
TRAINED_ON_ONE_IN = 20
"""The tokenizer is trained on one of so many files."""

ENDINGS = (".c", ".h", ".S", ".rst", ".txt", ".py", ".pl", ".sh", ".dts", ".dtsi", ".yaml")
GENERATED = "drivers/gpu/drm/amd/include/"
"""Names of registers in long tables."""

END_OF_FILE = "<|end of file|>"
_BATCH = 512


@dataclass(frozen=True)
class Tokens:
    """Two disjoint streams of tokens (int16, one dimension) and what they are of."""

    train: Tensor
    heldout: Tensor
    facts: dict[str, int | str]


def is_heldout(name: str) -> bool:
    """Decided by the name alone."""
    return zlib.crc32(name.encode()) % HELDOUT_ONE_IN == 0


def sources(package: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every source file of Debian's package, in the order of the archive."""
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as unpacked:
        with tarfile.open(fileobj=unpacked.stdout, mode="r|") as outer:
            for member in outer:
                if member.name.endswith(".tar.xz"):
                    with tarfile.open(fileobj=outer.extractfile(member), mode="r|xz") as inner:
                        yield from _texts(inner)
        unpacked.stdout.read()  # type: ignore[union-attr]


def _texts(archive: tarfile.TarFile) -> Iterator[tuple[str, str]]:
    for member in archive:
        _, _, name = member.name.partition("/")
        if member.isfile() and name.endswith(ENDINGS) and not name.startswith(GENERATED):
            yield name, archive.extractfile(member).read().decode(errors="replace")  # type: ignore[union-attr]


def build(files: Sequence[tuple[str, str]], folder: Path, most: int, vocab: int = VOCAB) -> None:
    """Train the tokenizer on some of the files, and write the tokens of them into ``folder``.

    Args:
        files: names and texts.
        folder: for the results.
        most: training tokens to keep.
        vocab: size of the vocabulary.

    Raises:
        ValueError: no file is held out, or all are.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    heldout = sorted(f for f in files if is_heldout(f[0]))
    train = sorted(f for f in files if not is_heldout(f[0]))
    if not heldout or not train:
        raise ValueError(f"{len(files)} source files are too few to train on and hold some out")
    random.Random(0).shuffle(train)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (text for _, text in train[::TRAINED_ON_ONE_IN]),
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[END_OF_FILE],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    digest = hashlib.sha256()

    def tokens_of(part: Sequence[tuple[str, str]]) -> Iterator[np.ndarray]:
        for begin in range(0, len(part), _BATCH):
            texts = [text for _, text in part[begin : begin + _BATCH]]
            for text, found in zip(texts, tokenizer.encode_batch_fast(texts), strict=True):
                digest.update(text.encode() + b"\0")
                yield np.array([*found.ids, 0], np.uint16)

    of_heldout = np.concatenate(list(tokens_of(heldout)))
    kept, count, train_files = [], 0, 0
    for tokens in tokens_of(train):
        if count < most:
            kept.append(tokens[: most - count])
            train_files += 1
        count += len(tokens)
    facts = {
        "vocab": tokenizer.get_vocab_size(),
        "files": len(files),
        "heldout_files": len(heldout),
        "heldout_tokens": len(of_heldout),
        "train_files": train_files,
        "train_tokens": min(most, count),
        "all_train_tokens": count,
        "sha256": digest.hexdigest(),
    }
    everything = np.concatenate([of_heldout, *kept])
    content = json.dumps(facts).encode() + b"\n" + everything.astype("<u2").tobytes()
    filters = [
        {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 28, "pb": 1, "lp": 1, "lc": 3}
    ]
    packed = lzma.compress(content, filters=filters)
    (folder / "tokens.xz").write_bytes(packed)
    print(json.dumps(facts, indent=1))
    print(f"{folder / 'tokens.xz'}: {len(packed) / 2**20:.1f} MiB")


def load(folder: Path) -> Tokens:
    """Load the tokens that ``build`` has written."""
    head, _, content = lzma.decompress((folder / "tokens.xz").read_bytes()).partition(b"\n")
    facts = json.loads(head)
    tokens = torch.from_numpy(np.frombuffer(content, "<u2").astype(np.int16))
    heldout = facts["heldout_tokens"]
    return Tokens(tokens[heldout:], tokens[:heldout], facts)


def main(argv: Sequence[str] | None = None) -> None:
    """Build the tokens."""
    parser = argparse.ArgumentParser(
        prog="kernel_text.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("package", type=Path, help="linux-source-6.1_*_all.deb")
    parser.add_argument("folder", type=Path, help="for tokenizer.json and tokens.xz")
    parser.add_argument(
        "--tokens", type=int, default=98_500_000, help="to train on (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    build(list(sources(options.package)), options.folder, options.tokens)


if __name__ == "__main__":
    main()
