"""The fonts that draw numbers: families to train on, and others that only the evaluation uses.

Each is a file of a Debian package, named beside it. No held-out family is a version of one that is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

PLAIN: Final = ("Regular", "Bold", "Italic", "BoldItalic")

TRAINED: Final[Mapping[str, Sequence[str]]] = {
    "fonts-adf-accanthis": ("AccanthisADFStd-Regular", "AccanthisADFStd-Bold", "AccanthisADFStd-Italic"),
    "fonts-adf-universalis": ("UniversalisADFStd-Regular", "UniversalisADFStd-Bold", "UniversalisADFStd-Cond"),
    "fonts-cantarell": ("Cantarell-Regular", "Cantarell-Light", "Cantarell-Bold", "Cantarell-ExtraBold"),
    "fonts-comfortaa": ("Comfortaa-Regular", "Comfortaa-Bold"),
    "fonts-crosextra-caladea": tuple(f"Caladea-{style}" for style in PLAIN),
    "fonts-dejavu-core": ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono"),
    "fonts-dejavu-extra": ("DejaVuSans-Oblique", "DejaVuSansCondensed", "DejaVuSerif-Italic"),
    "fonts-ebgaramond": ("EBGaramond12-Regular", "EBGaramond12-Bold", "EBGaramond12-Italic"),
    "fonts-firacode": ("FiraCode-Regular", "FiraCode-Light", "FiraCode-Bold"),
    "fonts-freefont-ttf": ("FreeSans", "FreeSansBold", "FreeSansOblique", "FreeSerif", "FreeSerifBold", "FreeMono"),
    "fonts-go": ("Go-Regular", "Go-Bold", "Go-Italic", "Go-Mono"),
    "fonts-hack": tuple(f"Hack-{style}" for style in PLAIN),
    "fonts-inconsolata": ("Inconsolata",),
    "fonts-inter": ("Inter-Regular", "Inter-Light", "Inter-Bold", "Inter-Black", "Inter-Italic"),
    "fonts-junicode": ("JunicodeTwoBeta-Regular", "JunicodeTwoBeta-Bold", "JunicodeTwoBeta-Italic"),
    "fonts-lato": ("Lato-Regular", "Lato-Light", "Lato-Bold", "Lato-Black", "Lato-Italic"),
    "fonts-liberation": tuple(f"Liberation{name}-{style}" for name in ("Sans", "Serif", "Mono") for style in PLAIN),
    "fonts-manrope": ("Manrope-Regular", "Manrope-ExtraBold"),
    "fonts-mononoki": ("mononoki-Regular", "mononoki-Bold", "mononoki-Italic"),
    "fonts-noto-core": tuple(
        f"Noto{name}-{style}" for name in ("Sans", "Serif", "SansDisplay", "SerifDisplay") for style in PLAIN
    ),
    "fonts-noto-mono": ("NotoSansMono-Regular", "NotoSansMono-Bold"),
    "fonts-open-sans": ("OpenSans-Regular", "OpenSans-Light", "OpenSans-ExtraBold", "OpenSans-CondBold"),
    "fonts-play": ("Play-Regular", "Play-Bold"),
    "fonts-quicksand": ("Quicksand-Regular", "Quicksand-Bold"),
    "fonts-roboto-unhinted": (
        "Roboto-Regular",
        "Roboto-Light",
        "Roboto-Black",
        "Roboto-Italic",
        "RobotoCondensed-Bold",
    ),
    "fonts-sil-andika": ("Andika-Regular", "Andika-Bold"),
    "fonts-sil-charis": tuple(f"CharisSIL-{style}" for style in PLAIN),
    "fonts-tuffy": ("Tuffy", "Tuffy_Bold", "Tuffy_Italic"),
    "fonts-urw-base35": (
        *("C059-Roman", "C059-Bold", "NimbusMonoPS-Bold", "NimbusRoman-Italic", "NimbusSansNarrow-Regular"),
        *("P052-Roman", "P052-Italic", "URWBookman-Light", "URWBookman-Demi", "URWGothic-Book", "URWGothic-Demi"),
    ),
}
HELD_OUT: Final[Mapping[str, Sequence[str]]] = {
    "fonts-adf-baskervald": ("BaskervaldADFStd", "BaskervaldADFStd-Bold", "BaskervaldADFStd-Italic"),
    "fonts-adf-libris": tuple(f"LibrisADFStd-{style}" for style in PLAIN),
    "fonts-adf-romande": ("RomandeADFStd-Regular", "RomandeADFStd-DemiBold", "RomandeADFStd-Italic"),
    "fonts-anonymous-pro": ("Anonymous Pro", "Anonymous Pro B", "Anonymous Pro I"),
    "fonts-cabin": tuple(f"Cabin-{style}" for style in PLAIN),
    "fonts-courier-prime": ("Courier Prime", "Courier Prime Bold", "Courier Prime Italic", "Courier Prime Sans"),
    "fonts-fanwood": ("Fanwood", "Fanwood-Italic"),
    "fonts-jetbrains-mono": tuple(f"JetBrainsMono-{style}" for style in PLAIN),
    "fonts-linuxlibertine": ("LinLibertine_R", "LinLibertine_RB", "LinLibertine_RI", "LinBiolinum_R", "LinBiolinum_RB"),
    "fonts-monoid": ("Monoid-Regular", "Monoid-Bold", "Monoid-Italic"),
    "fonts-sil-gentium-basic": ("GenBasR", "GenBasB", "GenBasI", "GenBkBasR"),
    "fonts-vollkorn": tuple(f"Vollkorn-{style}" for style in PLAIN),
    "fonts-yanone-kaffeesatz": ("YanoneKaffeesatz-Regular", "YanoneKaffeesatz-Bold"),
}


def families(names: Mapping[str, Sequence[str]], folder: Path) -> list[list[Path]]:
    """Return the font files of each package, found anywhere below `folder`.

    Raises:
        FileNotFoundError: One is missing; the message names the package to install.
    """
    found = {path.stem: path for path in sorted(folder.rglob("*")) if path.suffix in (".ttf", ".otf")}
    for package, stems in names.items():
        if missing := [stem for stem in stems if stem not in found]:
            raise FileNotFoundError(f"{folder} has no font {missing[0]!r}; install {package}, or give --fonts")
    return [[found[stem] for stem in stems] for stems in names.values()]
