"""Texts that a client may give as its name, its device or a reason, to change a page or a log."""

HOSTILE = [
    "<script>alert(1)</script>",
    "</td></table></details></body><h1>another page</h1>",
    "\"' onmouseover='alert(1)' <img src=https://example.org/x onerror=alert(1)>",
    "{{ 7 * 7 }} {% include 'x' %} {# no comment #}",
    "&lt;b&gt; &amp;#60; \u003cscript\u003e",
    "one line\nanother\r\n\ttext \x00\x07\x1b[31m",
    "\u202egnp.exe \u200b \ufeff ＜script＞ ‹b›",
    "half a character: \ud800, and two bytes read as Latin: \xc3\xa9 \xfe\xff",
]
