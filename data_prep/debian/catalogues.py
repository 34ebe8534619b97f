"""More German near the task: pairs from the message catalogues and the manuals in Debian's
packages.

A gettext catalogue (``.mo``) has source strings and their translations side by side. Manuals are
translated by paragraph: their pages have the same paragraphs in both languages, some with an id
(LibreOffice's help). `fetch` downloads the packages with apt-get, `build` reads them without
installing any.

The texts carry the licences of the packages they come from (most of them GPL, LGPL, MPL or GFDL):
nothing that is fetched or built here is part of jaxspec, and who passes such a file on passes those
texts on.
"""

import io
import re
import shutil
import struct
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

from rich.progress import track

from data_prep.debian.examples import (
    SUMMARIZE,
    TRANSLATE,
    Example,
    _is_translation,
    _letters,
    _t5_row,
)
from jaxspec.files import read_jsonl, write_jsonl

# What the largest German catalogues and manuals are in, and the English side of those that have a
# package each.
_NAMES = """
aisleriot amule-common anjuta-common apt aptitude-common ardour-data aspell audacious-plugins-data audacity-data
basket-data bibletime-data binutils-common brasero-common brltty caja-common calligra-data cherrytree cinnamon-l10n
claws-mail-i18n clisp coreutils darktable dasher-data dconf-editor debian-handbook debian-reference-de
debian-reference-en debmake-doc deja-dup dia-common digikam-data dpkg easytag elinks-data eog epiphany-browser-data
evince-common evolution-common evolution-data-server-common fcitx-data filezilla-common flatpak freeciv-data fwupd
gajim gawk gbrainy gcc-12-locales geany-common geany-plugins-common geary gedit-common geeqie-common gettext
gftp-common gimp-data gimp-help-de gimp-help-en git gnome-boxes gnome-builder gnome-color-manager
gnome-control-center-data gnome-devel-docs gnome-disk-utility gnome-settings-daemon-common gnome-shell-common
gnome-software-common gnome-system-monitor gnome-terminal-data gnome-user-docs gnote gnucash-common gnumeric-common
gnupg-l10n gpa gramps grisbi-common grub-common gscan2pdf gsettings-desktop-schemas gthumb-data guestfs-tools gufw
handbrake hexchat-common hugin-data inkscape installation-guide-amd64 kaddressbook kalarm kate5-data kdenlive-data
kdepim-runtime kdiff3 kget kgpg kio kleopatra kmail kmplot kmymoney-common konqueror konsole korganizer kphotoalbum
krb5-locales krename krita-l10n krusader ktorrent-data kwin-data libaqbanking-data libc-l10n libexif12
libgphoto2-l10n libgtk-3-common libkf5akonadi-data libkf5kdelibs4support-data libreoffice-help-de
libreoffice-help-en-us libsane-common libvirt-l10n lilypond lokalize lynx-common mailutils-common
mate-applets-common mate-control-center-common mate-panel-common mate-utils-common mc-data meld mercurial-common
minetest-data mutt mypaint-data nano nautilus-data neomutt network-manager network-manager-gnome ocrfeeder okular
orca pan parley-data partitionmanager phpmyadmin pidgin-data pitivi plasma-desktop-data plasma-discover-common
plasma-workspace-data pluma-common postgresql-client-15 remmina-common rhythmbox-data rkward-data rpm-i18n seahorse
shotwell-common skrooge-common solfege sssd-common subversion sudo sylpheed-i18n synaptic
system-config-printer-common tar tellico-data texinfo thunar-data tin tortoisehg totem-common udisks2
util-linux-locales viking vinagre virtinst vlc-l10n weechat-core xboard xfce4-settings xfsprogs xiphos-data xkb-data
xournalpp xsane-common zim
"""
PACKAGES = tuple(_NAMES.split())

_CATALOGUE = re.compile(r"/locale/de/LC_MESSAGES/[^/]+\.mo$")
_MANUAL = re.compile(r"\.(?:x?html|page|docbook)(?:\.(?:de|en))?$")
_LANGUAGE = re.compile(r"(?<=[/.])(?:(?P<de>de(?:-DE)?)|C|en(?:-US)?)(?=[/.]|$)")
_SHORTEST = 20
_FEWEST_WORDS = 3
_MOST_UNTRANSLATED = 0.6
_ACCESS_KEY = re.compile(r"[&_](?=\w)")
_IDENTIFIER = re.compile(r"\w+_\w+")
# Format directives, variables, markup, addresses, options, remaining access keys, undecodable
# bytes.
_NOT_PROSE = re.compile(
    r"%\W*[\d(A-Za-z]|\$[\w({]|[{}<>|\\\x00-\x1f\ufffd]|&#?\w+;|\w://|@\w|[_&]\w|(?:^|\s)--?\w|^\W*#|^\d+\.|::"
)
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "p para simpara title subtitle term h1 h2 h3 h4 h5 h6 li dt dd td th item listitem entry "
        "desc div section table figure ul ol dl tr body head br",
    )
)
_SKIPPED = frozenset(
    re.findall(r"\w+", "pre screen programlisting script style synopsis literallayout info credit")
)
_HAVE_IDS = frozenset(("p", "h1", "h2", "h3", "h4", "h5", "h6"))

Block = tuple[str, str]


def fetch(
    packages_dir: str | Path, packages: Sequence[str] = PACKAGES, timeout: float = 1200
) -> list[str]:
    """Downloads packages of this machine's Debian release with ``apt-get download``; none is
    installed.
    """
    if shutil.which("apt-get") is None:
        raise OSError(
            "apt-get was not found: run this on Debian, or copy .deb files into a directory and "
            "build that"
        )
    folder = Path(packages_dir)
    folder.mkdir(parents=True, exist_ok=True)
    shown = subprocess.run(
        ["apt-cache", "show", *packages], capture_output=True, text=True, check=False
    ).stdout
    available = set(re.findall(r"^Package: (\S+)$", shown, re.MULTILINE))
    wanted = [
        name for name in packages if name in available and not any(folder.glob(f"{name}_*.deb"))
    ]
    if wanted:
        subprocess.run(
            ["apt-get", "download", *wanted],
            cwd=folder,
            capture_output=True,
            check=False,
            timeout=timeout,
        )
    return [name for name in packages if not any(folder.glob(f"{name}_*.deb"))]


def build(packages_dir: str | Path, out_dir: str | Path) -> dict[str, int]:
    """Writes ``t5-catalogues.train.jsonl``: the pairs of all packages, without those that
    `examples.build` held out.

    A source with several translations keeps the most frequent.
    """
    held = {
        _letters(text.removeprefix(TRANSLATE).removeprefix(SUMMARIZE))
        for row in read_jsonl(Path(out_dir) / "t5.heldout.jsonl")
        for text in (row["input"], row["output"])
    }
    votes: dict[str, Counter[str]] = {}
    owner: dict[str, str] = {}
    for package, source, target in read_packages(Path(packages_dir)):
        if _is_prose(source, target) and held.isdisjoint((_letters(source), _letters(target))):
            votes.setdefault(source, Counter())[target] += 1
            owner.setdefault(source, package)
    rows = []
    for source, targets in votes.items():
        target = targets.most_common(1)[0][0]
        rows.append(_t5_row(Example("translation", TRANSLATE + source, target, owner[source], ())))
    name = "t5-catalogues.train.jsonl"
    write_jsonl(Path(out_dir) / name, rows)
    return {name: len(rows)}


def _is_prose(source: str, target: str) -> bool:
    if len(source) < _SHORTEST or not _is_translation(source, target):
        return False
    if _NOT_PROSE.search(source) or _NOT_PROSE.search(target):
        return False
    words, translation = source.split(), set(target.split())
    return len(words) >= _FEWEST_WORDS and len(
        translation.intersection(words)
    ) <= _MOST_UNTRANSLATED * len(translation)


def read_packages(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (package, English, German) for every text of the packages in a folder that has
    both.
    """
    pages: dict[str, dict[bool, tuple[str, list[Block]]]] = {}
    for deb in track(sorted(folder.glob("*.deb")), description="read packages"):
        package = deb.name.split("_")[0]
        unpacked = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE, check=False
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(unpacked)) as archive:
            for member in archive:
                language = _LANGUAGE.search(member.name) if _MANUAL.search(member.name) else None
                if not member.isfile() or not (language or _CATALOGUE.search(member.name)):
                    continue
                file = archive.extractfile(member)
                content = file.read() if file else b""
                if language:
                    path = _LANGUAGE.sub("*", member.name)
                    page = package, blocks(content.decode(errors="replace"))
                    pages.setdefault(path, {})[bool(language["de"])] = page
                elif content:
                    yield from ((package, *pair) for pair in messages(content))
    for page in pages.values():
        if len(page) == 2:
            package, german = page[True]
            yield from ((package, *pair) for pair in align(page[False][1], german))


def messages(catalogue: bytes) -> Iterator[tuple[str, str]]:
    """Yields the source strings of a ``.mo`` file and their translations; of a plural, every form
    that has a source.
    """
    order = "<" if catalogue[:4] == b"\xde\x12\x04\x95" else ">"
    count, sources, targets = struct.unpack_from(order + "3I", catalogue, 8)

    def text(table: int, number: int) -> str:
        length, start = struct.unpack_from(order + "2I", catalogue, table + 8 * number)
        return catalogue[start : start + length].decode(errors="replace")

    for number in range(count):
        source = text(sources, number).rpartition("\x04")[2]
        if source:  # the empty one is the header
            for pair in zip(source.split("\0"), text(targets, number).split("\0"), strict=False):
                yield _without_access_keys(*pair)


def _without_access_keys(source: str, target: str) -> tuple[str, str]:
    """Strips the mark of a menu entry's key, where both texts have one and it is no part of a name
    such as ``a_b``.
    """
    alone = all(len(_ACCESS_KEY.findall(text)) == 1 for text in (source, target))
    if alone and set(_IDENTIFIER.findall(source)).isdisjoint(_IDENTIFIER.findall(target)):
        source, target = _ACCESS_KEY.sub("", source), _ACCESS_KEY.sub("", target)
    return " ".join(source.split()), " ".join(target.split())


def align(english: list[Block], german: list[Block]) -> Iterator[tuple[str, str]]:
    """Pairs the blocks of a page: all if both languages have the same sequence, else those whose id
    is in both.
    """
    if [key for key, _ in english] == [key for key, _ in german]:
        yield from (
            (source, target) for (_, source), (_, target) in zip(english, german, strict=True)
        )
        return
    by_id = {key: text for key, text in german if key.startswith("#")}
    yield from ((text, by_id[key]) for key, text in english if key in by_id)


def blocks(page: str) -> list[Block]:
    """Reads the paragraphs of an HTML, DocBook or Mallard page, each with its ``#id``, or else the
    name of its tag.
    """
    reader = _Page()
    reader.feed(page)
    reader.close()
    return reader.blocks


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self._key = ""
        self._text: list[str] = []
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS or tag in _SKIPPED:
            self._flush()
            name = dict(attrs).get("id")
            self._key = f"#{name}" if name and tag in _HAVE_IDS else tag
        elif tag.startswith("gui") and self._text:  # a menu and its entry, side by side
            self._text.append(" " * self._text[-1][-1:].isalnum())
        self._skipped += tag in _SKIPPED

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _SKIPPED:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS or tag in _SKIPPED:
            self._flush()
            self._key = "/" + tag
        self._skipped = max(0, self._skipped - (tag in _SKIPPED))

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._text.append(data)

    def _flush(self) -> None:
        text = " ".join("".join(self._text).split())
        self._text = []
        if text:
            self.blocks.append((self._key, text))
