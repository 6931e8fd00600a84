"""Hold the template of a page of runs, for Jinja2, with everything in it escaped.

A Python module and no file of its own: Flower's app bundle carries no HTML, and the server that
writes a run's report has only the bundle.
"""

CSS = """\
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #5c6670;
  --line: #d8dee4; --card: #f6f8fa; --warn: #9a4c00; --blue: #0072b2; --good: #00734f;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0e1116; --ink: #e6e9ed; --soft: #9aa5b1; --line: #2b323a; --card: #161b22;
  --warn: #f0a35e; --blue: #5db8f0; --good: #3fcf9f; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.2rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .2rem .8rem; }
h1 { font-size: 1.5rem; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.4rem, 1fr));
  gap: .6rem; margin: 0 0 1.2rem; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .5rem .8rem; }
dt { color: var(--soft); font-size: .85rem; line-height: 1.3; } dd { margin: 0; }
.state { border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem;
  margin: .4rem 0 1rem; background: var(--card); }
.state p { margin: .2rem 0 0; }
.word { font-weight: 600; margin-right: .5rem; } .word::before { content: ""; width: .65rem;
  height: .65rem; border-radius: 50%; background: currentColor; display: inline-block;
  margin-right: .45rem; }
.running .word { color: var(--blue); } .finished .word { color: var(--good); }
.failed .word, .stopped .word { color: var(--bad); }
.running .word::before { animation: pulse 2s ease-in-out infinite; }
@keyframes pulse { 50% { opacity: .25; } }
@media (prefers-reduced-motion: reduce) { .running .word::before { animation: none; } }
progress { appearance: none; display: block; width: 100%; height: .5rem; margin: .7rem 0 .1rem;
  border: 0; border-radius: .25rem; overflow: hidden; background: var(--line);
  color: var(--blue); }
.finished progress { color: var(--good); }
progress::-webkit-progress-bar { background: var(--line); }
progress::-webkit-progress-value { background: var(--blue); }
progress::-moz-progress-bar { background: currentColor; }
.finished progress::-webkit-progress-value { background: var(--good); }
.lost { background: var(--bad); color: var(--paper); border-radius: .5rem; padding: .5rem .8rem; }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); margin: 1rem 0; }
figure { margin: 0; border: 1px solid var(--line); border-radius: .5rem; padding: .8rem;
  display: flex; flex-direction: column; justify-content: space-between; min-width: 0; }
figcaption { margin-bottom: .6rem; } figcaption b { font-weight: 600; }
figcaption span { display: block; color: var(--soft); font-size: .85rem; line-height: 1.35; }
figure svg { width: 100%; height: auto; display: block; color: var(--ink); }
figure.broad { grid-column: 1 / -1; } figure.broad svg { width: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; overflow-wrap: normal; }
summary { cursor: pointer; padding: .5rem 0; } .warn { color: var(--warn); }
.note { color: var(--soft); font-size: .92rem; max-width: 60rem; margin: .3rem 0 .6rem; }
.people th, .people td { overflow-wrap: normal; white-space: nowrap; }
.people td.long { overflow-wrap: anywhere; white-space: normal; min-width: 9rem; }
.people th[scope=row] { color: var(--ink); font-weight: 600; }
.why { display: block; color: var(--warn); font-size: .85rem; max-width: 24rem; }
.busy { color: var(--blue); }
.log { display: flex; flex-direction: column-reverse; max-height: 22rem; overflow: auto;
  border: 1px solid var(--line); border-radius: .5rem; background: var(--card); }
.log pre { margin: 0; padding: .6rem .8rem; font: 13px/1.45 ui-monospace, monospace;
  white-space: pre-wrap; }
.log .warn { font-weight: 600; }
.sample { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem;
  margin: 0 0 .8rem; } .sample p { margin: 0 0 .4rem; font-weight: 600; }
.sample p, .sample td { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.sample p, .sample table { max-height: 22rem; overflow: auto; display: block; }
.sample th { white-space: nowrap; } .sample .right td { color: var(--soft); }
@media (max-width: 44rem) {
  body { padding: .8rem; } .facts { grid-template-columns: 1fr 1fr; }
  table.people, .people tbody, .people tr, .people th, .people td { display: block; }
  .people thead, .people td:empty { display: none; }
  .people tr { border: 1px solid var(--line); border-radius: .5rem; margin: 0 0 .6rem;
    padding: .4rem .8rem; display: grid; grid-template-columns: 1fr 1fr; gap: 0 1rem; }
  .people th, .people td { border: 0; padding: .15rem 0; }
  .people th[scope=row], .people td.whole { grid-column: 1 / -1; }
  .people td { white-space: normal; min-width: 0; overflow-wrap: anywhere; }
  .people td::before { content: attr(data-label) " "; color: var(--soft); font-size: .85rem; }
  .people th[scope=row]::before { content: "client "; color: var(--soft); font-weight: 400; } }
"""

# It asks whether something is new, and replaces the parts that differ: what a reader has opened
# stays open, and where they have scrolled to stays. Without it the page loads itself anew.
SCRIPT = """\
"use strict";
let skew = 0;
const main = document.querySelector("main"), lost = document.getElementById("lost");
function words(seconds) {
  const whole = Math.max(0, Math.round(seconds)), two = n => String(n).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor(whole % 3600 / 60))} min`;
}
function tick() {
  for (const one of document.querySelectorAll("time[data-at]"))
    one.textContent = words(Date.now() / 1000 - skew - Number(one.dataset.at));
}
function put(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  for (const fresh of page.querySelectorAll("main > section")) {
    const old = document.getElementById(fresh.id);
    if (old.innerHTML === fresh.innerHTML && old.className === fresh.className) continue;
    const open = [...old.querySelectorAll("details")].map(one => one.open);
    old.className = fresh.className;
    old.replaceChildren(...fresh.childNodes);
    old.querySelectorAll("details").forEach((one, at) => { one.open = open[at] ?? one.open; });
  }
  main.dataset.version = page.querySelector("main").dataset.version;
  document.title = page.title;
}
async function look() {
  try {
    const seen = encodeURIComponent(main.dataset.version);
    const answer = await fetch(`/?seen=${seen}`, { cache: "no-store" });
    const date = Date.parse(answer.headers.get("Date"));
    const off = (Date.now() - date) / 1000;
    if (Math.abs(off) > 5) skew = off;
    if (answer.status === 200) { put(await answer.text()); tick(); }
    lost.hidden = answer.ok;
  } catch { lost.hidden = false; }
}
async function go() {
  if (!document.hidden) await look();
  setTimeout(go, 2000);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
setInterval(tick, 1000);
setTimeout(go, 2000);
"""

PAGE = """\
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

{% macro grid(pictures) %}
{% if pictures %}
<div class="grid">
  {% for one in pictures %}
  <figure{% if one.broad %} class="broad"{% endif %}>
    <figcaption><b>{{ one.title }}</b><span>{{ one.about }}</span></figcaption>
    <div class="wide">{{ one.svg }}</div>
  </figure>
  {% endfor %}
</div>
{% endif %}
{% endmacro %}

{% macro ago(at) -%}
<time data-at="{{ at }}">{{ minutes([0, now - at] | max) }}</time>
{%- endmacro %}

{% macro section(name, class="") %}
<section{% if runs | length < 2 %} id="{{ name }}"{% endif %}
  {%- if class %} class="{{ class }}"{% endif %}>
{{ caller() }}
</section>
{% endmacro %}

{% macro state_of(run) %}
{% if run.state %}
<div class="state"><span class="word">{{ run.state.word }}</span>{{ run.state.text }}
{%- if run.state.since is not none %} {{ ago(run.state.since) }}.{% endif %}
{% if run.state.advice %}<p class="note">{{ run.state.advice }}</p>{% endif %}
<progress max="1" value="{{ '%.4f' % run.state.done }}" aria-label="rounds done"></progress></div>
{% elif not run.finished %}
<p class="warn">This run has not finished.</p>
{% endif %}
{% if run.collapsed %}<p class="warn">{{ run.collapsed }}</p>{% endif %}
{% endmacro %}

{% macro classes_of(run) %}
{% if run.classes or run.without_classes %}
<h2>Class by class</h2>
<p class="note">{{ run.classes.about if run.classes else run.without_classes }}</p>
{% endif %}
{% if run.classes and run.classes.rows | length > 20 %}
<details><summary>{{ run.classes.rows | length }} classes</summary>
{{ table(run.classes.heads, run.classes.rows) }}
</details>
{% elif run.classes %}
{{ table(run.classes.heads, run.classes.rows) }}
{% endif %}
{% endmacro %}

{% macro samples_of(run) %}
{% if run.samples %}
<h2>What the model writes</h2>
<p class="note">The same test examples, which nobody trains on, answered word by word with the most
probable one{{ "." if run.live else ", after some of the rounds. samples.jsonl has all answers." }}
</p>
{% for one in run.samples %}
<div class="sample"><p>{{ one.instruction }}</p>
<table>
{% for when, text in one.rows %}
<tr{% if loop.first %} class="right"{% endif %}><th scope="row">{{ when }}</th>
<td>{{ text }}</td></tr>
{% endfor %}
</table></div>
{% endfor %}
{% endif %}
{% endmacro %}

{% macro participants_of(run, people) %}
<h2>Who takes part</h2>
{% if people.listed %}
<p class="note">A client is named by its partition of the data. Its budget is the fraction of the
adapter that it can train. Bytes are those of the replies that were used.
{%- if people.more %} There is room for {{ people.listed | length }}: those at work, and those that
took part last.{% endif %}
{%- if people.missing %} {{ people.missing }} more partition{{ "" if people.missing == 1 else "s" }}
{{ "has" if people.missing == 1 else "have" }} not been seen.{% endif %}</p>
<div class="wide"><table class="people">
{% set doing = "now" if run.live else "rejected" %}
<thead><tr><th scope="col">client</th><th scope="col">{{ doing }}</th>
{% if run.live %}<th scope="col">last heard of</th>{% endif %}
{% for head in ("device", "budget", "examples", "rounds", "heads", "seconds", "up", "down") %}
<th scope="col">{{ head }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for one in people.listed %}
<tr><th scope="row">{{ one.partition }}</th>
<td class="whole long{{ ' busy' if one.now == 'at work' else '' }}" data-label="{{ doing }}">
  {{- one.now }}
  {%- if one.rejected %}<span class="why">rejected {{ one.rejected }} time
    {{- "" if one.rejected == 1 else "s" }}, {{ one.reason }}</span>{% endif %}</td>
{% if run.live %}<td class="whole" data-label="last heard of">
  {%- if one.heard %}{{ ago(one.heard) }} ago{% endif %}</td>{% endif %}
<td class="long" data-label="device">{{ one.device }}</td>
<td data-label="budget">{{ one.budget }}</td>
<td data-label="examples">{{ one.examples }}</td>
<td data-label="rounds">{{ one.rounds }}{% if one.last_round %} (last {{ one.last_round }})
  {%- endif %}</td>
<td data-label="heads">{{ one.heads }}</td><td data-label="seconds">{{ one.seconds }}</td>
<td data-label="up">{{ megabytes(one.bytes_up) if one.rounds else "" }}</td>
<td data-label="down">{{ megabytes(one.bytes_down) if one.rounds else "" }}</td></tr>
{% endfor %}
</tbody></table></div>
{% if people.more %}<p class="note">And {{ people.more }} more clients.</p>{% endif %}
{% else %}
<p>Nobody yet.</p>
{% endif %}
{% if run.refused %}
<h2>Refused nodes</h2>
{{ table(("node", "reason"), run.refused[:50]) }}
{% if run.refused | length > 50 %}
<p class="note">And {{ run.refused | length - 50 }} more.</p>
{% endif %}
{% endif %}
{% endmacro %}

{% macro rejected_of(run) %}
<h2>Rejected replies</h2>
<p class="note">A reply is what a client sends back in a round. The server checks each one, and does
not use a reply that is damaged, too late or out of bounds.
{% if run.rejections > run.rejected | length %}The last {{ run.rejected | length }} of
{{ run.rejections }}:{% endif %}</p>
{% if run.rejected %}
{{ table(("round", "client", "reason"), run.rejected) }}
{% else %}
<p>None.</p>
{% endif %}
{% endmacro %}

{% macro log_of(run) %}
<h2>Log</h2>
{% if run.log %}
<div class="log" tabindex="0"><pre>{% for line, warns in run.log %}
{% if warns %}<span class="warn">{{ line }}</span>{% else %}{{ line }}{% endif %}
{{ "\n" }}{% endfor %}</pre></div>
{% else %}
<p>None: a run of an earlier version keeps no log.</p>
{% endif %}
{% endmacro %}

{% macro all_of(run) %}
{% call section("state", run.state.word if run.state else "") %}
{% if runs | length < 2 %}
<header><h1>{{ title }}</h1><span class="note">{{ run.name }}</span></header>
{% endif %}
{{ state_of(run) }}
{% endcall %}
{% call section("facts") %}
<dl class="facts">
  {% for name, value in run.facts.items() %}
  <div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
  {% endfor %}
</dl>
{% endcall %}
{% call section("pictures") %}{{ grid(run.pictures) }}{% endcall %}
{% call section("classes") %}{{ classes_of(run) }}{% endcall %}
{% call section("samples") %}{{ samples_of(run) }}{% endcall %}
{% call section("people") %}{{ participants_of(run, run.people) }}{% endcall %}
{% call section("rejected") %}{{ rejected_of(run) }}{% endcall %}
{% call section("log") %}{% if run.live %}{{ log_of(run) }}{% endif %}{% endcall %}
{% call section("settings") %}
<details><summary>Settings</summary>
{{ table([], run.settings) }}
<p>{{ run.path }}</p>
</details>
{% endcall %}
{% endmacro %}

<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{% if version %}
<link rel="icon" href="data:,">
<noscript><meta http-equiv="refresh" content="5"></noscript>
{% endif %}
<title>{% if version and runs %}{{ runs[0].state.word }}: {% endif %}{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main{% if version %} data-version="{{ version }}"{% endif %}>
{% if version %}
<p class="lost" id="lost" hidden>No answer from ravan-flwr report --live: this is what it showed
last. Start it again to go on.</p>
{% endif %}
{% if problem %}
{% call section("state", "failed") %}
<header><h1>{{ title }}</h1></header>
<div class="state"><span class="word">cannot be shown</span>{{ problem }}</div>
{% endcall %}
{% for name in
  ("facts", "pictures", "classes", "samples", "people", "rejected", "log", "settings") %}
{% call section(name) %}{% endcall %}
{% endfor %}
{% elif comparison %}
<h1>{{ title }}</h1>
<p class="note">Runs that differ in the seed alone are one row here, and one line with a band in the
pictures: the line is their mean, the band goes from the least to the greatest.</p>
{{ table(comparison.heads, comparison.rows) }}
{{ grid(comparison.pictures) }}
<h2>Each run</h2>
{% for run in runs %}
<details><summary>{{ run.name }}</summary>
{{ all_of(run) }}
</details>
{% endfor %}
{% else %}
{{ all_of(runs[0]) }}
{% endif %}
</main>
{% if version %}<script>{{ script }}</script>{% endif %}
</body>
</html>
"""
