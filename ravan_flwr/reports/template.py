"""Hold the template of a report's page, for Jinja2, with everything in it escaped.

A Python module and no file of its own: Flower's app bundle carries no HTML, and the server that
writes a run's report has only the bundle.
"""

CSS = """\
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #5c6670;
  --line: #d8dee4; --card: #f6f8fa; --warn: #9a4c00; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0e1116; --ink: #e6e9ed; --soft: #9aa5b1; --line: #2b323a; --card: #161b22;
  --warn: #f0a35e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.2rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.4rem, 1fr));
  gap: .6rem; margin: 0 0 1.2rem; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .5rem .8rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-size: 1.15rem; }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); margin: 1rem 0; }
figure { margin: 0; border: 1px solid var(--line); border-radius: .5rem; padding: .8rem;
  display: flex; flex-direction: column; justify-content: space-between; }
figcaption { margin-bottom: .6rem; } figcaption b { font-weight: 600; }
figcaption span { display: block; color: var(--soft); font-size: .85rem; line-height: 1.35; }
figure.broad { grid-column: 1 / -1; } figure.broad svg { max-width: none; }
figure svg { width: 100%; height: auto; display: block; color: var(--ink); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
summary { cursor: pointer; padding: .5rem 0; } .warn { color: var(--warn); }
.note { color: var(--soft); font-size: .92rem; max-width: 60rem; }
.sample { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem;
  margin: 0 0 .8rem; } .sample p { margin: 0 0 .4rem; font-weight: 600; }
.sample p, .sample td { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.sample p, .sample table { max-height: 22rem; overflow: auto; display: block; }
.sample th { white-space: nowrap; } .sample .right td { color: var(--soft); }
"""

# What a model has written; the live page has it, too.
SAMPLES = """\
{% macro samples_of(samples) %}
{% for one in samples %}
<div class="sample"><p>{{ one.instruction }}</p>
<table>
{% for when, text in one.rows %}
<tr{% if loop.first %} class="right"{% endif %}><th scope="row">{{ when }}</th>
<td>{{ text }}</td></tr>
{% endfor %}
</table></div>
{% endfor %}
{% endmacro %}
"""

PAGE = (
    SAMPLES
    + """\
{% macro table(heads, rows) %}
<div class="wide"><table>
  {% if heads %}
  <tr>{% for head in heads %}<th scope="col">{{ head }}</th>{% endfor %}</tr>
  {% endif %}
  {% for row in rows %}
  <tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
  {% endfor %}
</table></div>
{% endmacro %}

{% macro grid(charts) %}
<div class="grid">
  {% for chart in charts %}
  <figure{% if chart.broad %} class="broad"{% endif %}>
    <figcaption><b>{{ chart.title }}</b><span>{{ chart.about }}</span></figcaption>
    <div class="wide">{{ chart.svg() }}</div>
  </figure>
  {% endfor %}
</div>
{% endmacro %}

{% macro facts_of(run) %}
{% if not run.finished %}
<p class="warn">This run has not finished.</p>
{% endif %}
{% if run.collapsed %}
<p class="warn">{{ run.collapsed }}</p>
{% endif %}
<dl class="facts">
  {% for name, value in run.facts.items() %}
  <div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
  {% endfor %}
</dl>
{% endmacro %}

{% macro classes_of(run) %}
{% if run.classes %}
<h2>Class by class</h2>
<p class="note">{{ run.classes.about }}</p>
{% if run.classes.rows | length > 20 %}
<details><summary>{{ run.classes.rows | length }} classes</summary>
{{ table(run.classes.heads, run.classes.rows) }}
</details>
{% else %}
{{ table(run.classes.heads, run.classes.rows) }}
{% endif %}
{% elif run.without_classes %}
<h2>Class by class</h2>
<p class="note">{{ run.without_classes }}</p>
{% endif %}
{% endmacro %}

{% macro details_of(run) %}
{{ classes_of(run) }}
{% if run.samples %}
<h2>What the model writes</h2>
<p class="note">The same test examples, which nobody trains on, answered word by word with the most
probable one, after some of the rounds. samples.jsonl has all answers.</p>
{{ samples_of(run.samples) }}
{% endif %}
<h2>Rejected replies</h2>
<p class="note">A reply is what a client sends back in a round. The server checks each one, and does
not use a reply that is damaged, too late or out of bounds.</p>
{% if run.rejected %}
{{ table(["round", "client", "reason"], run.rejected) }}
{% else %}
<p>None.</p>
{% endif %}
<details><summary>Settings</summary>
{{ table([], run.settings) }}
<p>{{ run.path }}</p>
</details>
{% endmacro %}

<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
{{ style }}
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if runs | length == 1 %}
{{ facts_of(runs[0]) }}
{{ grid(compared + runs[0].charts) }}
{{ details_of(runs[0]) }}
{% else %}
<p class="note">Runs that differ in the seed alone are one row here, and one line with a band in the
pictures: the line is their mean, the band goes from the least to the greatest.</p>
{{ table(comparison.heads, comparison.rows) }}
{{ grid(compared) }}
<h2>Each run</h2>
{% for run in runs %}
<details><summary>{{ run.name }}</summary>
{{ facts_of(run) }}
{{ grid(run.charts) }}
{{ details_of(run) }}
</details>
{% endfor %}
{% endif %}
</body>
</html>
"""
)
