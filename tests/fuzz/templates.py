"""Chat templates by people who mean harm: out of the sandbox, or beyond time and memory."""

from random import Random

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir('EXECUTED') }}",
    "{{ (''|attr('__class__'))|attr('__base__') }}",
    "{{ '{0.__class__.__base__}'.format('') }}",
    "{{ '{0[0].__class__}'.format_map([1]) }}",
    "{{ ['{0.__class__}']|map('format', 1)|list }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|groupby('__class__') }}",
    "{{ messages|sum(attribute='__class__') }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ namespace.__init__ }}{{ namespace.mro() }}",
    "{{ lipsum.__globals__['os'].mkdir('EXECUTED') }}",
    "{{ strftime_now.__closure__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ (messages|list).append.__self__ }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.mkdir('EXECUTED') }}",
    "{% extends 'x' %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ (1).__class__ }}{{ [].__len__() }}",
    "{{ dict(__class__=1).__class__ }}",
    "{{ range.__class__ }}{{ ().__class__.__base__ }}",
    "{% for x in [].__iter__ %}{% endfor %}",
    "{{ caller.__code__ }}{{ loop.__init__ }}",
    "{{ undefined_name.__init__.__globals__ }}",
]

# Expressions that grow; X stands for any of SOURCES.
GROWERS = [
    "X * 10000000000",
    "10000000000 * X",
    "X ~ X",
    "'%10000000000d' % 1",
    "'%.*f' % (1000000000, 1.0)",
    "'{:>10000000000}'.format(1)",
    "'{:{}}'.format(1, 10000000000)",
    "'{:.1000000000f}'.format(1.0)",
    "'a'.ljust(10000000000)",
    "'a'.rjust(10000000000)",
    "'a'.center(10000000000)",
    "'a'.zfill(10000000000)",
    "'a\t'.expandtabs(10000000000)",
    "X | center(10000000000)",
    "X | indent(1000000000)",
    "(X | string) | indent('y' * 100000)",
    "messages | tojson(indent=1000000000)",
    "X | tojson(separators=('a' * 9999999999, 'b'))",
    "X | wordwrap(1)",
    "X | batch(10000000000, 'x') | list",
    "X | slice(1000000000) | list",
    "('a' * 100000).replace('a', 'b' * 100000)",
    "('a' * 100000) | replace('', 'b' * 100000)",
    "('b' * 1000).join('a' * 1000000)",
    "range(100000) | join('x' * 100000)",
    "10 ** 10 ** 10",
    "2 ** 100000000",
    "(7 ** 99999) ** 99999",
    "1.5 | round(1000000000)",
    "1 | round(1000000000, 'floor')",
    "(1).to_bytes(10000000000, 'big')",
    "range(100000) | map('string') | list * 100000",
    "[range(100000)] * 1000 | sum(start=[])",
    "lipsum(n=1000000)",
    "lipsum(n=1, min=100000000, max=100000001)",
    "X | urlize",
    "('<' * 1000000) | striptags",
    "('<a>' * 1000000) | striptags",
    "('x ' * 1000000) | wordwrap(1) | title",
    "('9' * 4301) | int",
    "('9' * 1000000) | int(base=16)",
    "dict(range(100000) | batch(2))",
    "[0] | batch(2, X) | list",
    "strftime_now('%Y' * 100000000)",
    "strftime_now('%1000000000d')",
    "('a' * 100000) | list | permutations",
    "[[X, X], [X, X]] | pprint",
    "'' | urlencode * 1000000000",
    "{'a': X} | xmlattr",
    "('a' * 1000000).split('')",
    "('a' * 1000000) | truncate(10000000000)",
    "('a ' * 1000000).split() | unique | list",
    "('ab' * 100000).translate({97: 'x' * 1000000})",
    "('a' * 3000000) | e | e | e",
    "('&' * 3000000) | e | forceescape | forceescape",
    *(
        f"('xn--' ~ 'a' * 400000).encode('utf-8').decode('{codec}')"
        for codec in ("idna", "punycode", "utf-7", "unicode_escape", "zlib")
    ),
    *(f"('é' * 100000).encode('{codec}')" for codec in ("punycode", "idna", "raw_unicode_escape")),
    *(f"('a' * 1000000).{how}('a' * 9000 ~ 'b' ~ 'a' * 900000)" for how in ("rfind", "rsplit")),
    *(f"('b' * 1000000).{how}('a' * 900000 ~ 'b')" for how in ("strip", "lstrip", "rstrip")),
    "('b' * 1000000) | trim('a' * 900000 ~ 'b')",
    "(X | e).replace('', 'a' * 100000)",
    "(('a' * 100000) | e).join(('b' * 100000) | list)",
    *(f"(['a' * 900000] * 100000) | {how}" for how in ("sort", "min", "unique | list")),
    "('a' * 900000 ~ X) in ['a' * 900000 ~ 'b'] * 100000",
    "['a' * 900000 ~ 'b'] * 100000 == ['a' * 900000 ~ 'b'] * 100000",
    "('a' * 900000).startswith(('a' * 899999 ~ 'b',) * 100000)",
    "range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | unique | list",
    "(('f' * 3000000) | int(base=16)) // 7",
    "{}.fromkeys(range(100000), X)",
]
SOURCES = [
    "messages",
    "'abc'",
    "[1, 2]",
    "range(100000)",
    "messages[0].content",
    "(1, 2)",
    "{'a': 1}",
]


def grown(body: str, start: str, after: str = "{{ ns.s }}", times: int = 99) -> str:
    """A namespace whose `s` is made anew, again and again."""
    loop = f"{{% for a in range({times}) %}}{body}{{% endfor %}}"
    return f"{{% set ns = namespace(s={start}) %}}{loop}{after}"


def made(value: str) -> str:
    return f"{{% set ns.s = {value} %}}"


def loops(body: str, *sequences: str) -> str:
    """Loops inside one another over these."""
    for sequence in reversed(sequences):
        body = f"{{% for a in {sequence} %}}{body}{{% endfor %}}"
    return body


MANY = "range(100000)"
MEGABYTE = "{% set x = 'a' * 1000000 %}"
LIST = "{% set x = range(100000) | list %}"
LOOPS = [
    loops("", MANY, MANY, MANY),
    loops("{{ a }}", MANY, MANY),
    loops("", MANY, f"{MANY} if false"),
    loops("x" * 50_000, MANY),
    loops("{{ loop(range(9)) }}", "range(9) recursive"),
    loops("{% if loop.depth < 4 %}{{ loop(range(100000)) }}{% endif %}", f"{MANY} recursive"),
    "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    *(grown(made(twice), "'ab'") for twice in ("ns.s ~ ns.s", "ns.s + ns.s", "ns.s.join(ns.s)")),
    *(grown(made(twice), "'ab'") for twice in ("'%s%s' % (ns.s, ns.s)", "'{0}{0}'.format(ns.s)")),
    grown(made("ns.s | replace('a', 'aaa')"), "'a'"),
    grown("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}", "'a'"),
    *(grown(made(twice), "[1]") for twice in ("ns.s + ns.s", "[ns.s, ns.s]", "(ns.s, ns.s)")),
    *(grown(made(twice), "1") for twice in ("{'a': ns.s, 'b': ns.s}", "dict(a=ns.s, b=ns.s)")),
    *(grown(made(twice), "1") for twice in ("namespace(a=ns.s, b=ns.s)", "[ns, ns]")),
    grown(made("(ns.s, ns.s)"), "[1]", "{{ ns.s == ns.s[0] }}{{ [ns.s] | unique | list }}", 40),
    grown(made("{'a': ns.s, 'b': ns.s}"), "1", "{{ ns.s | tojson }}"),
    grown(made("ns.s | batch(2, ns.s) | list"), "[1]"),
    grown(made("ns.s * ns.s"), "9", ""),
    grown(made("ns.s * ns.s"), "9", "{{ ns.s }}", 12),
    grown(made("ns.s + [x[a:]]"), "[]", "", 99_999).replace("{%", f"{MEGABYTE}{{%", 1),
    LIST + loops("{% if a in x %}{% endif %}", "x"),
    LIST + loops("{% set y = x | sort %}", "x"),
    MEGABYTE + loops("{% if x == x ~ '' %}{% endif %}", MANY),
    MEGABYTE + loops("{% set y = x[1:] %}", MANY),
    loops("{{ messages | tojson }}{{ messages }}", MANY),
    loops("", "messages[0].content.split('')"),
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{% call(x) f() %}{% endcall %}{% macro f() %}{{ caller(1) }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% autoescape 9 ** (9 ** 9) %}{% endautoescape %}",
    "{% filter center(10000000000) %}a{% endfilter %}",
    "{% filter replace('a', 'a' * 1000000) %}{{ 'a' * 1000000 }}{% endfilter %}",
    "{{ range(100000) | map('center', 100000) | join }}",
    "{{ range(100000) | map('replace', '', 'a' * 100000) | list }}",
    "{{ range(100000) | select('in', range(100000) | list) | list | length }}",
    "{{ range(100000) | select('divisibleby', 7) | map('string') | map('indent', 9999) | list }}",
    ("{{ (" * 300 + "1" + ") }}") * 300,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "1 + " * 5000 + "1 }}",
    "{{ x" + ".a" * 5000 + " }}",
    "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
    "{{ '" + "a" * 1_000_000 + "' }}",
    "{% raw %}" + "{{" * 10_000 + "{% endraw %}",
]

WRAPS = [
    "{{ @ }}",
    "{% set x = @ %}",
    "{% set x = @ %}{{ x | length }}",
    "{{ (@) | string | length }}",
    "{% if @ %}a{% endif %}",
    "{% for x in @ %}{{ x }}{% endfor %}",
    "{{ [@, @] }}",
    "{{ messages[@] }}",
    "{% for m in messages %}{{ @ }}{% endfor %}",
    "{% macro f(x=@) %}{{ x }}{% endmacro %}{{ f() }}",
    "{{ '' if @ else '' }}",
]


def hostile_template(rng: Random) -> str:
    """One of them, or an expression that grows where an expression may stand."""
    how = rng.random()
    if how < 0.25:
        return rng.choice(ESCAPES)
    if how < 0.55:
        return rng.choice(LOOPS)
    grower = rng.choice(GROWERS)
    for _ in range(5):
        inner = f"({rng.choice(GROWERS)})" if how > 0.9 else rng.choice(SOURCES)
        grower = grower.replace("X", inner, 1)
    return rng.choice(WRAPS).replace("@", grower.replace("X", "'abc'"))
