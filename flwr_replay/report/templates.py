"""The pages' templates, in Jinja2, and what fills them: everything is escaped.

They are Python since a bundle of `flwr run` holds no other kind of file for them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["numbers", "render", "spared"]

NUMBER = re.compile(r"([+-]?[\d.,]+(e-\d+)?( ± [\d.]+| \[.*\])?( [kMGT]?B| s| %)?|–|nan|inf|)$")

TEMPLATES = {
    # The frame of every page: one file, no network, light and dark, prints.
    "frame": """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --faint: #5a5a5a; --line: #c9c9c9; --shade: 0, 90, 156;
  --c0: #0072b2; --c1: #b34700; --c2: #007a5a; --c3: #8f4a9e; --c4: #6b6b00; --c5: #a3003d; --c6: #4d4d4d; --c7: #00708a; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #161616; --faint: #b0b0b0; --line: #444; --shade: 90, 170, 240;
  --c0: #6cb8f0; --c1: #ffa366; --c2: #5cd6a8; --c3: #d69be0; --c4: #d6d65c; --c5: #ff80a8; --c6: #bbb; --c7: #66d1e6; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 76rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.3; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
p, main > ul, main > ol { max-width: 46rem; } .faint, figcaption, caption { color: var(--faint); } caption { text-align: left; padding-bottom: .3rem; }
caption span { display: inline-block; max-width: min(58rem, calc(100vw - 2rem)); }
.beside { display: flex; flex-wrap: wrap; gap: 0 3rem; } .beside > * { flex: 1 1 26rem; min-width: 0; } main > .columns { columns: 26rem; column-gap: 3rem; max-width: none; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { text-align: left; padding: .25rem 1.4rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; font-weight: normal; }
thead th { font-weight: 600; vertical-align: bottom; } .number { text-align: right; } td.number, td[style] { white-space: nowrap; } .warning { border-left: 4px solid var(--c1); padding-left: .8rem; }
.scroll { overflow-x: auto; background: linear-gradient(90deg, var(--paper) 40%, transparent) local, linear-gradient(-90deg, var(--paper) 40%, transparent) 100% 0 local,
  linear-gradient(90deg, rgba(128, 128, 128, .6), transparent), linear-gradient(-90deg, rgba(128, 128, 128, .6), transparent) 100% 0; background-size: 3rem 100%, 3rem 100%, 1rem 100%, 1rem 100%; background-repeat: no-repeat; }
figure { margin: 1rem 0; } figure svg { width: 100%; max-width: 44rem; display: block; }
figure img { max-width: 100%; image-rendering: pixelated; } figure .drawn { image-rendering: auto; width: 100%; max-width: 36rem; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
tbody th { min-width: 8.5rem; max-width: 16rem; overflow-wrap: anywhere; }
@media screen { .methods th, .methods td { padding-right: .75rem; } .methods tbody th { min-width: 6rem; } .methods td:not([class]) { min-width: 9.4rem; } }
.headline { font-size: 1.3rem; max-width: 56rem; border-left: 4px solid var(--c1); padding-left: .8rem; }
.pairs { display: flex; flex-wrap: wrap; gap: .5rem; } .pairs img { width: clamp(5.8rem, 7.2vw, 6rem); } .large img { width: clamp(10rem, 15vw, 11.8rem); } .large img:nth-child(n + 7) { display: none; }
.confusion td, .confusion th { text-align: right; padding: .2rem .5rem; } .confusion tbody th { min-width: 6rem; }
{% for n in range(11) %}.shade{{ n }} { background: rgba(var(--shade), {{ n * 0.05 }}); } {% endfor %}
details { margin: 1rem 0; } pre { font-size: .85rem; columns: 17rem; white-space: pre-wrap; } pre.one { columns: auto; } a { color: var(--c0); }
@media (max-width: 36rem) { svg text { font-size: 15px; } tbody th { position: sticky; left: 0; background: var(--paper); min-width: 7.5rem; } th, td { padding-right: .8rem; } td:last-child:not(.number) { min-width: 12rem; } }
@media print { .sign { break-after: page; } :root { color-scheme: light; --ink: #000; --paper: #fff; --faint: #444; } body { max-width: none; margin: 0; font-size: 10pt; } figure, tr, li { break-inside: avoid; } details { display: block; } details:not(.folded)::details-content { content-visibility: visible; block-size: auto; } h2, caption { break-after: avoid; }
  .beside > * { flex-basis: 18rem; } .scroll { overflow: visible; } table { font-size: .85em; } th, td { padding-right: .8em; } .confusion td, .confusion th { padding: .2rem .3em; } }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% block content %}{% endblock %}
</main>
<footer><p class="faint">Written by flwr-replay {{ version }}. This page loads nothing from the network.</p></footer>
</body>
</html>
""",
    # Pictures, which `flwr_replay.report.charts` draws, and tables.
    "draw": """\
{% macro chart(picture, title) %}
<figure>
<div role="img" aria-label="{{ title }}. {{ picture.told }}.">{{ picture.svg | safe }}</div>
<figcaption>{{ title }}</figcaption>
</figure>
{% endmacro %}
{% macro table(content) %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ content.caption }}"><table{% if content.shaded is defined %} class="confusion"{% endif %}>
<caption><span>{{ content.caption }}</span></caption>
{% set right = content.rows | numbers %}<thead><tr>{% for head in content.heads %}<th scope="col"{% if loop.index0 in right %} class="number"{% endif %}>{{ head }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in content.rows %}
<tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}{% if content.shaded is defined %}<td class="shade{{ cell[1] }}">{{ "{:,}".format(cell[0]) }}</td>{% else %}<td{% if loop.index in right %} class="number"{% endif %}>{{ cell }}</td>{% endif %}{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% endmacro %}
""",
    "run": """\
{% extends "frame" %}
{% import "draw" as draw %}
{% block content %}
<p>{{ question }}</p>
<p><strong>{{ answer }}</strong></p>
{% for line in warnings %}<p class="warning"><strong>Warning.</strong> {{ line }}</p>{% endfor %}

<h2>By round</h2>
{% for line in few %}<p>{{ line }}</p>{% endfor %}
<div class="beside">{% for chart, caption in curves.values() %}{{ draw.chart(chart, caption) }}{% endfor %}</div>

<h2>By institution</h2>
{{ draw.table(metrics) }}
<div class="beside">
{% for chart, caption in institutions.values() %}{{ draw.chart(chart, caption) }}{% endfor %}
{% if confusion %}{{ draw.table(confusion) }}{% endif %}
</div>
{% for line in notes %}<p>{{ line }}</p>{% endfor %}

<h2>How the labels differ</h2>
<div class="beside">
<div>{% for line in skew %}<p>{{ line }}</p>{% endfor %}</div>
{% if labels %}{{ draw.table(labels) }}{% endif %}
</div>

<h2>What left the institutions</h2>
{% if privacy %}{{ draw.table(privacy) }}{% endif %}
<div class="beside">
<div>{% for line in claim %}<p>{{ line }}</p>
{% endfor %}<ul>{% for line in kinds %}<li>{{ line }}</li>{% endfor %}</ul>
{% for line in recorded %}<p>{{ line }}</p>{% endfor %}</div>
{{ draw.table(left) }}
</div>

<h2>Who did not take part</h2>
{% if failures %}<ul>{% for line in failures %}<li>{{ line }}</li>{% endfor %}</ul>{% else %}<p>{{ all_there }}</p>{% endif %}
{% if pictures %}
<h2>Pictures</h2>
<p><strong>These show patients.</strong> Keep this page where the data may lie.</p>
{% for name, text, caption in pictures %}<figure><img src="data:image/png;base64,{{ text }}" alt="{{ name }}"><figcaption>{{ caption }}</figcaption></figure>{% endfor %}
{% endif %}
{% for line in left_out %}<p>{{ line }}</p>{% endfor %}

<h2>Configuration and versions</h2>
{{ draw.table(versions) }}
<details><summary>All options, as config.yaml has them</summary><pre>{{ config }}</pre></details>
{% endblock %}
""",
    "compare": """\
{% extends "frame" %}
{% import "draw" as draw %}
{% block content %}
<p>{{ question }}</p>
{% for line in verdicts %}<p><strong>{{ line }}</strong></p>{% endfor %}
<div class="methods">{{ draw.table(table) }}</div>
<div class="beside"><div>{% for chart, caption in charts.values() %}{{ draw.chart(chart, caption) }}{% endfor %}
{% if judged %}<p>{{ judged }}</p>{% endif %}</div>
<div><h2>How to read this</h2>
<ul>{% for line in notes %}<li>{{ line }}</li>{% endfor %}</ul></div></div>
<h2>The runs</h2>
<details><summary>{{ count }} runs, each with a page</summary>
<div class="scroll" tabindex="0" role="region" aria-label="The runs"><table>
<caption><span>By seed, with the run's page</span></caption>
<thead><tr><th scope="col">method</th>{% for seed in seeds %}<th scope="col" class="number">{{ seed }}</th>{% endfor %}</tr></thead>
<tbody>{% for label, cells in runs %}
<tr><th scope="row">{{ label }}</th>{% for value, place in cells %}<td class="number">{% if place %}<a href="{{ place }}">{{ value }}</a>{% else %}{{ value }}{% endif %}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div></details>
{% if options %}<h2>Options</h2>
<ul>{% for option in options %}<li>{{ option }}</li>{% endfor %}</ul>{% endif %}
{% endblock %}
""",
    "study": """\
{% extends "frame" %}
{% block content %}
{{ body }}
{% endblock %}
""",
    "attacks": """\
{% extends "frame" %}
{% import "draw" as draw %}
{% macro pairs(attack, looks) %}
<figure><div class="{{ looks }}">{% for image in attack.pairs %}<img src="data:image/png;base64,{{ image }}" alt="{{ attack.alt }}">{% endfor %}</div>
<figcaption>{{ attack.caption }}</figcaption></figure>
{% endmacro %}
{% block content %}
<p class="headline">{{ headline }}</p>
{% for attack in first if attack.pairs %}{{ pairs(attack, "pairs large") }}{% endfor %}
<div class="beside"><p><strong>This page shows patients.</strong> Keep it where the data may lie. {{ claim }}</p>
<p>{{ about }}</p></div>
{% for institution, results in by_institution.items() %}
<h2>{{ institution }}</h2>
<div class="beside"><ul>{% for attack in results %}
<li>{{ attack.sentence }}</li>{% endfor %}
</ul>{% if institution in charts %}<div>{{ draw.chart(charts[institution], "share that each attack got right; line: 95 % interval; dashed: guessing") }}</div>{% endif %}</div>
{% for attack in results if attack.pairs and attack not in first %}{{ pairs(attack, "pairs") }}{% endfor %}
{% endfor %}
{% if images.rows %}
<h2>Figures</h2>
{{ draw.table(images) }}
{% endif %}
{% if members.rows %}
<h2>Membership</h2>
{{ draw.table(members) }}
{% endif %}
<h2>What this does not show</h2>
<ul class="columns">{% for line in not_shown %}<li>{{ line }}</li>{% endfor %}</ul>
<p class="faint">Attacks on recorded messages; the judge has the originals, the attacker has not.</p>
{% endblock %}
""",
    "evidence": """\
{% extends "frame" %}
{% import "draw" as draw %}
{% block content %}
<p>{{ about }}</p>
<h2>What left</h2>
{% for table in left %}{{ draw.table(table) }}{% endfor %}
<ul>{% for line in kinds %}<li>{{ line }}</li>{% endfor %}</ul>
<p>Small cells. {{ floor }}</p>
{% if runs is defined %}{{ draw.table(runs) }}
<h2>The policy</h2>
<pre>{{ policy }}</pre>{% endif %}
<h2>Who could see it</h2>
<ul>{% for line in seen %}<li>{{ line }}</li>{% endfor %}</ul>
<h2>Under which ε</h2>
<p>{{ claim }}</p>
{% if absent is defined %}{% if privacy %}{{ draw.table(privacy) }}{% else %}<p>No account states an ε.</p>{% endif %}
<h2>Who took no part</h2>
{% if absent %}<ul>{% for line in absent %}<li>{{ line }}</li>{% endfor %}</ul>{% else %}<p>All took part in every exchange.</p>{% endif %}
{% if untested %}<p>Not tested at the end: {{ untested | join(", ") }}.</p>{% endif %}{% endif %}
<h2>Attacks and audits</h2>
<ul>{% for line in attacks %}<li>{{ line }}</li>{% endfor %}<li>{{ audit }}</li><li>{{ sacroml }}</li></ul>
{% if figures %}{{ draw.table(figures) }}{% endif %}
<h2>What ran, and what it made</h2>
{{ draw.table(sums) }}
{{ draw.table(versions) }}
<h2>What SATRE and the NHS toolkit ask</h2>
<p>An aid to an assessment, and none itself. "None" is no control of this program; another may be yours. SATRE as of commit 020b572, DSPT by the ten standards' names and the first one's assertions: the toolkit's CAF outcomes were not at hand.</p>
{{ draw.table(controls) }}
<h2>Signed</h2>
<div class="scroll"><table><caption>Signatures</caption><tbody>{% for who in ("prepared by", "output checker", "data protection officer", "for the board") %}<tr><th scope="row">{{ who }}</th><td>name ______________________</td><td>date ____________</td><td>signature ______________________</td></tr>{% endfor %}</tbody></table></div>
{% endblock %}
""",
    "officer": """\
{% extends "frame" %}
{% import "draw" as draw %}
{% block content %}
<section class="sign">
{{ draw.table(first) }}
<div class="scroll"><table><caption>Signatures</caption><tbody>{% for who in ("data protection officer", "head of the institution") %}<tr><th scope="row">{{ who }}</th><td>name ____________________</td><td>date __________</td><td>signature ____________________</td></tr>{% endfor %}</tbody></table></div>
</section>
<div class="beside"><div>{% for line in about %}<p>{{ line }}</p>
{% endfor %}
{% for line in sums %}<p>{{ line }}</p>
{% endfor %}{% if samples %}<p><strong>{{ samples }}</strong></p>{% endif %}</div>
<div>{% for table in by_kind %}{{ draw.table(table) }}
{% endfor %}</div></div>
<h2>The verdict, line by line</h2>
<div class="beside"><div><p>{% if policy %}The policy is {{ policy }}, as it stands at the end of this page.{% else %}Without a policy only the built-in limits hold.{% endif %} An institution that refuses sends its name and one line that says why; the study goes on without it or, under masks, may stop.</p>
{% if reasons %}<p>Reasons:</p>
<ol>{% for line in reasons %}<li>{{ line }}</li>{% endfor %}</ol>{% endif %}</div>
{{ draw.table(rules) }}</div>
<details{% if not allowed %} open{% endif %}><summary>Every field</summary>
{% for table in fields %}{{ draw.table(table) }}
{% endfor %}</details>

<h2>What is protected, and what is not</h2>
<p>{{ claim }}</p>
{% if protected %}<ul>{% for line in protected %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
{% if unprotected %}<p>These may leave without differential privacy:</p>
<ul>{% for line in unprotected %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
{% if not_hidden %}<p>{{ hides }} Not hidden from it:</p>
<ul>{% for line in not_hidden %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
<p>TLS keeps the network from reading messages. It hides nothing from the server{% if not not_hidden %}, which has them as they are{% endif %}. What earlier runs have sent is not listed here.</p>

<div class="beside"><div><h2>What the institution enforces itself</h2>
<p>The program at the institution does this, whatever the server sends:</p>
<ul>{% for line in enforced %}<li>{{ line }}</li>{% endfor %}{% if pinned %}<li>It accepts only the weights that the policy names for {{ pinned }}. Whether the server's are those is decided when they arrive.</li>{% endif %}</ul></div>

<div><h2>What an honest server is asked to do</h2>
<p>The institution has to trust whoever runs the server:</p>
<ul>{% for line in asked %}<li>{{ line }}</li>{% endfor %}</ul></div></div>

<h2>Policy, options and versions</h2>
{% if policy_text %}<details open><summary>The policy, as the file has it</summary><pre class="one">{{ policy_text }}</pre></details>{% endif %}
<details class="folded"><summary>All options of the run, and versions; on paper folded, and in officer.json</summary><pre>{{ options }}</pre>
{{ draw.table(versions) }}</details>
{% endblock %}
""",
}


@contextmanager
def spared(file: Path) -> Iterator[None]:
    """Say in one line that a picture or page could not be written; the results that it would show are written before."""
    try:
        yield
    except Exception as error:  # whatever it is, as what is drawn came from many
        why = " ".join(str(error).split())[:200]
        logging.getLogger("flwr").warning("%s is not written, all results are: %s %s", file, type(error).__name__, why)


def numbers(rows: Sequence[Sequence[object]]) -> set[int]:
    """Return which columns of a table hold numbers, with or without a unit, and nothing else.

    >>> numbers([["a", "0.88 ± 0.04", "model", "1.89 MB", ""], ["b", "–", "per-sample", "3,900 B", "-0.1 [-0.2, 0]"]])
    {1, 3, 4}
    """
    columns = enumerate(zip(*rows, strict=True))
    return {at for at, cells in columns if at and all(map(NUMBER.match, map(str, cells))) and any(map(str, cells))}


def render(template: str, **values: object) -> str:
    """Return the text of a page, by the name of its template."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    """Return what compiles each template once."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    environment = Environment(loader=DictLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.filters["numbers"] = numbers
    return environment
