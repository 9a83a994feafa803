"""The generated parts of README.md and docs/results/: ``python -m benchmarks page``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import page_models, page_ops, results
from .page_parts import Content, folded, wrapped

ROOT = Path(__file__).parent.parent
START, END = "<!-- results: python -m benchmarks page -->", "<!-- end of results -->"


def _of(card: str, lines: list[str]) -> list[str]:
    """The lines about a result of a card; folded and without plots unless it is the first card."""
    if card == results.CARDS[0]:
        return lines
    images = [i for i, line in enumerate(lines) if line.startswith("![")]
    lines = [line for i, line in enumerate(lines) if i not in images and i - 1 not in images]
    return folded(f"On an {card.upper()}", lines)


Section = Callable[[Content, Path], list[str]]
"""Lines about one result, for the page at a path."""


@dataclass(frozen=True)
class Page:
    """A page with a generated part, between the marks :data:`START` and :data:`END`.

    Attributes:
        path: of the file.
        sections: by the name of their result, in the order of the page.
        cards: whose results the page shows.
    """

    path: Path
    sections: dict[str, Section]
    cards: Sequence[str] = results.CARDS

    def render(self, folder: Path = results.FOLDER) -> str:
        """The generated part, marks included. A result that is not on disk has no section.

        Where several cards have a result, their sections follow each other; plots are those of the
        first card.
        """
        parts: list[str] = []
        for name, section in self.sections.items():
            for card in self.cards:
                content = results.load(name, results.of_card(card, folder))
                if content is not None:
                    lines = section(content, self.path)
                    parts.append("\n".join(map(wrapped, _of(card, lines))))
        return "\n\n".join([START, *parts, END])

    def update(self) -> bool:
        """Rewrite the generated part in place; whether anything changed.

        Raises:
            ValueError: the page lacks one of the marks.
        """
        text = self.path.read_text("utf-8")
        if START not in text or END not in text:
            raise ValueError(f"{self.path} needs the marks {START!r} and {END!r}")
        before, after = text[: text.index(START)], text[text.index(END) + len(END) :]
        new = before + self.render() + after
        self.path.write_text(new, "utf-8")
        return new != text


def _topic(file: str, **sections: Section) -> Page:
    """A page of docs/results/."""
    return Page(ROOT / "docs" / "results" / f"{file}.md", sections)


TOPICS = (
    _topic("linear", linear=page_ops.linear),
    _topic(
        "blocks",
        block=page_models.block,
        layer=page_models.layer,
        memory=page_models.memory,
        saved=page_models.saved,
    ),
    _topic(
        "models",
        popular=page_models.popular,
        hf_llama=page_models.hf_llama,
        lora=page_models.lora,
        head=page_models.head,
    ),
    _topic("experts", experts=page_models.experts, grouped=page_ops.grouped),
    _topic(
        "gpus",
        fsdp2=page_models.fsdp2,
        shards=page_models.shards,
        tensor_parallel=page_models.tensor_parallel,
        expert_parallel=page_models.expert_parallel,
    ),
    _topic("kernels", gemm=page_ops.gemm, cast=page_ops.cast, producers=page_ops.producers),
    _topic("host", host=page_ops.host),
    _topic("demos", train_lm=page_models.training, train_moe=page_models.training),
)
"""The pages of results, one a topic."""

README = Page(
    ROOT / "README.md",
    {
        "block": page_models.block_on_cards,
        "popular": page_models.popular_in_brief,
        "fsdp2": page_models.fsdp2_in_brief,
    },
    cards=results.CARDS[:1],
)
PAGES = (README, *TOPICS)
