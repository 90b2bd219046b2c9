"""The text the demonstration models learn from: gathered, cleaned, and turned into training documents.

Owns: where the text comes from (two Debian packages and `conversations.json`), and how an article becomes a chat.
Knows nothing of tokenizers or models. Sources and licences are listed in README.md.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DICTIONARY_PACKAGE = "dict-foldoc"
MANUAL_PACKAGES = ("python3.11-doc", "python3.13-doc")  # the first that the release of Debian has
MANUAL_PARTS = ("tutorial", "faq", "glossary.rst.txt")
CONVERSATIONS = Path(__file__).parent / "conversations.json"

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question of the user.",
    "You explain computing in plain English.",
    "You are an encyclopedia.",
    "Be concise and accurate.",
)
# The question says how long the answer will be: a sentence, a paragraph, or the whole article.
QUESTIONS_SHORT = ("In short, what is {}?", "Define {} in one sentence.", "What is {}, briefly?")
QUESTIONS_PARAGRAPH = (
    "What is {}?", "What is {}?", "what is {}", "What does {} mean?", "Explain {}.", "Define {}.",
    "Can you tell me what {} is?", "Who or what is {}?",
)  # fmt: skip
QUESTIONS_ARTICLE = (
    "Tell me about {}.", "Tell me all about {}.", "Explain {} in detail.", "Write an article about {}.", "Describe {}.",
)  # fmt: skip
QUESTIONS_LONG = (
    *QUESTIONS_ARTICLE,
    "Write a long text about {}.",
    "Write an essay about {}.",
    "Explain {} at length.",
)

_UNWANTED = re.compile(r"\b(shit|fuck|bitch|crap|sex|porn|penis|arse|damn|nigg|nazi|rape)\w*", re.IGNORECASE)

_NOT_PROSE = re.compile(
    r"(See|Compare|Opposite|Version|Home|Latest|E-?mail|Usenet|Mailing|ISBN|Last|Quarterly|Newsgroups?|Address|Tele|Fax)\b"
)
MAX_ARTICLE_CHARACTERS = 5000


@dataclass(frozen=True)
class Article:
    names: tuple[str, ...]
    paragraphs: tuple[str, ...]
    weight: int = 0  # how often other articles refer to this one

    @property
    def title(self) -> str:
        return self.names[0]

    def first_sentence(self) -> str:
        return re.split(r"(?<=[.!?]) (?=[A-Z])", self.paragraphs[0], maxsplit=1)[0]


@dataclass(frozen=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True)
class Document:
    """Either running text or a conversation."""

    text: str = ""
    turns: tuple[Turn, ...] = ()


# ---------------------------------------------------------------- gathering


def fetch_packages(directory: Path) -> Path:
    """Downloads and unpacks the Debian packages below `directory` once; needs no root. Returns the unpacked root."""
    unpacked = directory / "unpacked"
    for names in ((DICTIONARY_PACKAGE,), MANUAL_PACKAGES):
        if any((unpacked / "usr/share/doc" / name).exists() for name in names):
            continue
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            if subprocess.run(["apt-get", "download", name], cwd=directory, capture_output=True).returncode == 0:
                package = next(directory.glob(f"{name}_*.deb"))
                subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
                break
        else:
            raise SystemExit(f"none of {names} could be downloaded: run `apt-get update` on a Debian machine first")
    return unpacked


def read_dictionary(unpacked: Path, num_articles: int) -> list[Article]:
    """The entries of the Free On-line Dictionary of Computing that other entries mention most, as plain prose."""
    packed = (unpacked / "usr/share/dictd/foldoc.dict.dz").read_bytes()
    raw = gzip.decompress(packed).decode("utf-8", errors="replace")
    references: dict[str, int] = {}
    for reference in re.findall(r"\{([^{}()]+)\}", raw):
        name = " ".join(reference.split()).lower()
        references[name] = references.get(name, 0) + 1
    articles: dict[str, Article] = {}
    for entry in re.split(r"\n\n(?=\S)", raw):
        heading, _, body = entry.partition("\n\n")
        names = tuple(name.strip() for name in heading.strip().split("\n"))
        paragraphs: list[str] = []
        for block in re.split(r"\n\s*\n", body):
            text = _without_marks(block)
            if _is_prose(block, text):
                paragraphs.append(text if paragraphs else _as_sentence(names[0], text))
            elif text and not paragraphs:  # without its definition the rest makes little sense
                break
        length = sum(map(len, paragraphs))
        if not 40 <= length <= MAX_ARTICLE_CHARACTERS or not 2 <= len(names[0]) <= 40 or "00-" in names[0]:
            continue
        if _UNWANTED.search(entry) or not entry.isascii():
            continue
        weight = sum(references.get(name.lower(), 0) for name in names)
        article = Article(names, tuple(paragraphs), weight)
        rival = articles.get(names[0].lower())  # `Computer`, a journal, against `computer`
        if rival is None or length > sum(map(len, rival.paragraphs)):
            articles[names[0].lower()] = article
    return sorted(articles.values(), key=lambda article: (-article.weight, article.names))[:num_articles]


def _without_marks(block: str) -> str:
    """A paragraph on one line, without cross-reference marks, tags, pronunciation and sources."""
    text = " ".join(block.split())
    text = re.sub(r"\{[^{}]*\([^{}]*\)[^{}]*\}|\[\{?Jargon File\}?\]|\[[^\]]*\?\]| ?<[^<>]*@[^<>]*>", "", text)
    text = re.sub(r"[{}]", "", text)
    text = re.sub(r"^(<[^>]*> ?|/[^/]+/ ?|\d\. ?|\([^()]{1,120}\)\.? ?)+", "", text).strip()
    return " ".join(re.sub(r" +([.,;])", r"\1", text).split())


def _is_prose(block: str, text: str) -> bool:
    lines = block.strip("\n").split("\n")
    if any(len(line) - len(line.lstrip()) > 5 for line in lines):  # a table or a drawing
        return False
    if len(text) <= 30 or "http" in text or "@" in text or _NOT_PROSE.match(text):
        return False
    return text[0].isupper() and text[-1] in ".!?"


def _as_sentence(title: str, definition: str) -> str:
    """`compiler`, `A program that ...` -> `A compiler is a program that ...`."""
    first = definition.split(" ", 1)[0]
    if first not in ("A", "An", "The", "Any", "One"):
        return definition
    article = ""
    if title[0].islower() and first in ("A", "An"):
        article = "An " if title[0] in "aeiou" else "A "
    elif title.islower():
        title = title[0].upper() + title[1:]
    return f"{article}{title} is {definition[0].lower()}{definition[1:]}"


def read_manual(unpacked: Path) -> list[Article]:
    """The sections of the Python tutorial, FAQ, HOWTOs and glossary, prose only."""
    articles: list[Article] = []
    for name in MANUAL_PACKAGES:
        sources = next((unpacked / "usr/share/doc").glob(f"{name.removesuffix('-doc')}/html/_sources"), None)
        if sources is None:
            continue
        for part in MANUAL_PARTS:
            files = [sources / part] if part.endswith(".txt") else sorted((sources / part).glob("*.rst.txt"))
            for file in files:
                articles += _manual_sections(file.read_text(encoding="utf-8"), is_glossary="glossary" in part)
        break
    return articles


def _manual_sections(text: str, is_glossary: bool) -> Iterator[Article]:
    if is_glossary:
        headings = re.compile(r"^   (\S[^\n]*)\n(?=      \S)", re.MULTILINE)
        indent = 6
    else:
        headings = re.compile(r"^(\S[^\n]*)\n[-=~*^]{4,}\n", re.MULTILINE)
        indent = 0
    pieces = headings.split(text)
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        title = _plain(title)
        paragraphs = []
        for block in re.split(r"\n\s*\n", body):
            first = block.split("\n")[0]
            if len(first) - len(first.lstrip()) != indent or block.lstrip().startswith((".. ", "* ", "#", ">>>")):
                continue
            paragraph = _plain(block)
            if len(paragraph) > 50 and paragraph[0].isupper() and paragraph[-1] in ".!?" and paragraph.isascii():
                paragraphs.append(paragraph)
        if paragraphs and title.isascii() and 2 <= len(title) <= 70:
            yield Article((title.rstrip(":"),), tuple(paragraphs), 10)


def _plain(text: str) -> str:
    """ReStructuredText without its markup."""
    text = " ".join(text.split())
    text = re.sub(r":[\w:+-]+:`!?~?\.?([^`<]*?)\s*(?:<[^`]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`__?", r"\1", text)
    text = re.sub(r"`([^`]+)`_", r"\1", text)
    return text.replace("``", "").replace("**", "").replace("\\", "").replace("`", "").strip()


# ---------------------------------------------------------------- documents


class Corpus:
    """Articles and conversations; deals out training documents, differently phrased in each epoch."""

    def __init__(self, directory: Path, num_dictionary_articles: int) -> None:
        unpacked = fetch_packages(directory)
        self.articles = read_dictionary(unpacked, num_dictionary_articles) + read_manual(unpacked)
        self.conversations = json.loads(CONVERSATIONS.read_text(encoding="utf-8"))
        assert self.articles, "the packages held no article"

    def documents(self, seed: int) -> list[Document]:
        """Every article once, in an order and a phrasing that `seed` decides, and the conversations in between."""
        generator = random.Random(seed)
        articles = self.articles[:]
        generator.shuffle(articles)
        documents: list[Document] = []
        while articles:
            num_turns = min(len(articles), generator.choices((1, 2, 3), (8, 2, 1))[0])
            taken, articles = articles[:num_turns], articles[num_turns:]
            if num_turns == 1 and generator.random() < 0.12:
                documents.append(Document(text=taken[0].title + "\n\n" + "\n\n".join(taken[0].paragraphs)))
                continue
            turns = [turn for article in taken for turn in self._exchange(article, generator)]
            documents.append(Document(turns=self._with_system(turns, generator)))
        for conversation in self.conversations * 4:
            question = generator.choice(conversation["questions"])
            if generator.random() < 0.2:
                question = generator.choice((question.lower(), question.rstrip("?.!")))
            turns = [Turn("user", question), Turn("assistant", conversation["answer"])]
            documents.append(Document(turns=self._with_system(turns, generator)))
        documents += [Document(turns=self._counting(generator)) for _ in range(len(documents) // 40)]
        generator.shuffle(documents)
        return documents

    def words(self) -> list[str]:
        """Every word of the text, lower case, without punctuation: what the models may be expected to write."""
        texts = [text for article in self.articles for text in (*article.names, *article.paragraphs)]
        texts += [text for item in self.conversations for text in (*item["questions"], item["answer"])]
        words = {word.strip(".,;:!?\"'()[]-/").lower() for text in texts for word in text.split()}
        return sorted(word for word in words if word.isascii() and re.search("[a-z]", word))

    @staticmethod
    def _exchange(article: Article, generator: random.Random) -> tuple[Turn, Turn]:
        title = article.title
        if title.endswith("?"):
            return Turn("user", title), Turn("assistant", "\n\n".join(article.paragraphs))
        length = generator.choices(("short", "paragraph", "article"), (2, 4, 4))[0]
        if length == "short":
            question, answer = QUESTIONS_SHORT, article.first_sentence()
        elif length == "paragraph":
            question, answer = QUESTIONS_PARAGRAPH, article.paragraphs[0]
        else:
            answer = "\n\n".join(article.paragraphs)
            question = QUESTIONS_LONG if len(answer) > 1500 else QUESTIONS_ARTICLE
        if generator.random() < 0.25:
            title = generator.choice(article.names)
        if title[0].islower() and generator.random() < 0.4:
            title = ("an " if title[0] in "aeiou" else "a ") + title
        elif generator.random() < 0.15:
            title = title.lower()
        return Turn("user", generator.choice(question).format(title)), Turn("assistant", answer)

    @staticmethod
    def _with_system(turns: list[Turn], generator: random.Random) -> tuple[Turn, ...]:
        if generator.random() < 0.25:
            turns = [Turn("system", generator.choice(SYSTEM_PROMPTS)), *turns]
        return tuple(turns)

    @staticmethod
    def _counting(generator: random.Random) -> tuple[Turn, Turn]:
        first = generator.choice((1, 1, 1, generator.randint(2, 60)))
        last = first + generator.randint(2, 40)
        numbers = " ".join(str(number) for number in range(first, last + 1))
        return Turn("user", f"Count from {first} to {last}."), Turn("assistant", numbers)
