"""The formats of JSON Schema: those that llguidance enforces, and expressions for others.

Where a format's texts are no regular language, or nobody would want all of them (hosts in brackets, every script), the
expression has some of its texts only, and none that is not of the format. Sources: RFC 3986, 3987, 6570, 6901 and the
draft of relative JSON pointers.
"""

from __future__ import annotations

FORMATS = frozenset(["duration", "ipv4", "ipv6", "uri", "uuid"])
"""As the library has them."""

_SCRIPTS = "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0400-\u045f\u3041-\u3096\u4e00-\u9fff\uac00-\ud7a3"
"""Letters of some scripts."""
_HEX = "%[0-9A-Fa-f]{2}"


def _reference(beyond: str, *, absolute: bool) -> str:
    """URIs and references, or with characters beyond ASCII IRIs."""
    unreserved, marks = rf"A-Za-z0-9._~{beyond}\-", "!$&'()*+,;="
    char = rf"(?:[{unreserved}{marks}:@]|{_HEX})"
    first = rf"(?:[{unreserved}{marks}@]|{_HEX})"
    host = rf"(?:[{unreserved}{marks}]|{_HEX})*"
    authority = rf"//(?:(?:[{unreserved}{marks}:]|{_HEX})*@)?{host}(?::[0-9]*)?"
    tail = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    behind = rf"(?:{authority}(?:/{char}*)*|/(?:{char}+(?:/{char}*)*)?|{char}+(?:/{char}*)*)?"
    with_scheme = rf"[A-Za-z][A-Za-z0-9+.-]*:{behind}{tail}"
    if absolute:
        return f"^{with_scheme}$"
    without = rf"(?:{authority}(?:/{char}*)*|/(?:{char}+(?:/{char}*)*)?|{first}+(?:/{char}*)*)?{tail}"
    return f"^(?:{with_scheme}|{without})$"


_VARIABLE = r"[A-Za-z0-9_](?:\.?[A-Za-z0-9_])*(?:\*|:[1-9][0-9]{0,3})?"
_LABEL = r"(?:[a-zA-Z0-9]{1,63}|[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,30})"
_SHORT = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,14}"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL}){{%d,2}}|{_SHORT}(?:\.{_SHORT}){{%d,6}})"
"""At most 253 characters: three labels, or seven short ones."""
_LETTERS = r"a-zA-Z0-9!#$%&'*+/=?^_`{|}~"
_WORD = f"[{_LETTERS}]+"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
"""No year 0: many a program has none."""
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29"
)
_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = (
    rf"{_HOUR}:{_MINUTE}:{_MINUTE}(?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR}:{_MINUTE})"
    r"|23:59:60(?:\.[0-9]+)?(?:[Zz]|[+-]00:00)"
)
_ESCAPE = r"\\[dDsSwWnrt.*+?^$|()\[\]{}\\/]"
_CLASS = rf"\[\^?(?:[A-Za-z0-9_ .,:;@#%=+*?$!<>/\"'(){{}}{_SCRIPTS}]|a-z|A-Z|0-9|{_ESCAPE})+-?\]"
_COUNT = r"(?:[*+?]|\{(?:[0-9]{1,2},?|[01],[1-9]|[0-9],[1-9][0-9])\})\??"
_ATOM = rf"(?:[A-Za-z0-9_ .,:;@#%=!<>/\"'&~`{_SCRIPTS}-]|{_ESCAPE}|{_CLASS})"


def _expression(depth: int) -> str:
    """Expressions that ECMAScript, Python, Perl and Rust read alike, with groups so deep within each other."""
    group = rf"|\((?:\?:)?{_expression(depth - 1)}\)" if depth else ""
    return rf"(?:(?:{_ATOM}{group})(?:{_COUNT})?|[|^$])*"


PATTERNS = {
    "date-time": f"^(?:{_DATE})[Tt](?:{_TIME})$",
    "time": f"^(?:{_TIME})$",
    "date": f"^(?:{_DATE})$",
    "email": rf"^{_WORD}(?:[.-]{_WORD})*@{_HOST % (1, 1)}$",
    "hostname": f"^{_HOST % (0, 0)}$",
    "idn-email": rf"^[{_LETTERS}{_SCRIPTS}]+(?:[.-][{_LETTERS}{_SCRIPTS}]+)*@{_HOST % (1, 1)}$",
    "idn-hostname": f"^{(_HOST % (0, 0)).replace('A-Z', '')}$",
    "iri": _reference("\u00a1-\ud7ff\uf900-\ufdcf\ufdf0-\uffef", absolute=True),
    "iri-reference": _reference("\u00a1-\ud7ff\uf900-\ufdcf\ufdf0-\uffef", absolute=False),
    "json-pointer": "^(?:/(?:[^/~]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~]|~[01])*)*)$",
    "regex": f"^{_expression(2)}$",
    "uri-reference": _reference("", absolute=False),
    "uri-template": rf"^(?:[!#$&()*+,./0-9:;=?@A-Z\[\]_a-z~-]|{_HEX}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
}


_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_V4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_PART = "[0-9A-Fa-f]{1,4}"


def _v6() -> str:
    """Eight parts, of which two colons may leave some out, and of which an IPv4 address may be the last two."""
    last = f"(?:{_PART}:{_PART}|{_V4})"
    options = [f"(?:{_PART}:){{6}}{last}", f"(?:(?:{_PART}:){{0,6}}{_PART})?::"]
    for num in range(7):
        before = f"(?:(?:{_PART}:){{0,{5 - num}}}{_PART})?" if num < 6 else ""
        options.append(f"{before}::" + (f"(?:{_PART}:){{{num - 1}}}{last}" if num else _PART))
    return "|".join(options)


_PERIOD = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_SPAN = "T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
TEXT_PATTERNS = {
    "duration": f"^P(?:{_PERIOD}(?:{_SPAN})?|{_SPAN}|[0-9]+W)$",
    "ipv4": f"^{_V4}$",
    "ipv6": f"^(?:{_v6()})$",
    "uri": _reference("", absolute=True),
    "uuid": "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
}
"""`FORMATS`, for strings that stand as they are. Sources: RFC 4122, RFC 4291, and ISO 8601's grammar in RFC 3339."""
