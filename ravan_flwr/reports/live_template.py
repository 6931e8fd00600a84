"""Hold the template of the live page, for Jinja2, with everything in it escaped.

A Python module and no file of its own, like that of a report (`template.py`), whose style
it shares.
"""

from ravan_flwr.reports.template import SAMPLES

CSS = """\
:root { --c0: #0072b2; --c1: #c85200; --c2: #008a63; --good: #00734f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --c0: #5db8f0; --c1: #ff9a52; --c2: #3fcf9f; --good: #3fcf9f; --bad: #ff8a80; } }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .2rem .8rem; }
h1 { margin: 0; } .note { margin: .3rem 0 .6rem; }
.state { border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem;
  margin: .8rem 0 1rem; background: var(--card); }
.state p { margin: .2rem 0 0; }
.word { font-weight: 600; margin-right: .5rem; } .word::before { content: ""; width: .65rem;
  height: .65rem; border-radius: 50%; background: currentColor; display: inline-block;
  margin-right: .45rem; }
.running .word { color: var(--c0); } .finished .word { color: var(--good); }
.failed .word, .stopped .word { color: var(--bad); }
.running .word::before { animation: pulse 2s ease-in-out infinite; }
@keyframes pulse { 50% { opacity: .25; } }
@media (prefers-reduced-motion: reduce) { .running .word::before { animation: none; } }
progress { appearance: none; display: block; width: 100%; height: .5rem; margin: .7rem 0 .1rem;
  border: 0; border-radius: .25rem; overflow: hidden; background: var(--line); color: var(--c0); }
progress::-webkit-progress-bar { background: var(--line); }
progress::-webkit-progress-value { background: var(--c0); }
progress::-moz-progress-bar { background: var(--c0); }
.lost { background: var(--bad); color: var(--paper); border-radius: .5rem; padding: .5rem .8rem; }
section { scroll-margin-top: 1rem; }
.facts { grid-template-columns: repeat(auto-fit, minmax(6.9rem, 1fr)); }
.facts div { padding: .5rem .7rem; } .facts dd { font-size: .98rem; }
.facts dt { line-height: 1.3; }
.finished progress { color: var(--good); }
.finished progress::-webkit-progress-value { background: var(--good); }
.finished progress::-moz-progress-bar { background: var(--good); }
.axis { stroke: var(--line); stroke-width: 1; } .tick { fill: var(--soft); font-size: 12px; }
.end { text-anchor: end; } .mid { text-anchor: middle; }
polyline { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.l0 { stroke: var(--c0); } .l1 { stroke: var(--c1); stroke-dasharray: 7 4; }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); }
.cell { stroke: var(--line); stroke-width: .5; }
.key { display: flex; flex-wrap: wrap; gap: .1rem 1rem; color: var(--soft); font-size: .85rem;
  margin: 0; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem;
  margin-right: .35rem; vertical-align: -.08rem; }
.k0 { background: var(--c0); } .k1 { background: var(--c1); } .k2 { background: var(--c2); }
table.people { width: 100%; font-variant-numeric: tabular-nums; }
th, td { overflow-wrap: normal; white-space: nowrap; }
td.long { overflow-wrap: anywhere; white-space: normal; min-width: 9rem; }
.people th[scope=row] { color: var(--ink); font-weight: 600; }
.why { display: block; color: var(--warn); font-size: .85rem; max-width: 24rem; }
.busy { color: var(--c0); } .log { display: flex; flex-direction: column-reverse;
  max-height: 22rem; overflow: auto; border: 1px solid var(--line); border-radius: .5rem;
  background: var(--card); }
.log pre { margin: 0; padding: .6rem .8rem; font: 13px/1.45 ui-monospace, monospace;
  white-space: pre-wrap; }
.log .warn { font-weight: 600; }
@media (max-width: 44rem) {
  body { padding: .8rem; } .facts { grid-template-columns: 1fr 1fr; }
  table.people, .people tbody, .people tr, .people th, .people td { display: block; }
  .people thead { display: none; }
  .people tr { border: 1px solid var(--line); border-radius: .5rem; margin: 0 0 .6rem;
    padding: .4rem .8rem; display: grid; grid-template-columns: 1fr 1fr; gap: 0 1rem; }
  .people th, .people td { border: 0; padding: .15rem 0; }
  .people th[scope=row], .people td.whole { grid-column: 1 / -1; }
  .people td { white-space: normal; min-width: 0; overflow-wrap: anywhere; }
  .people td:empty { display: none; }
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

PAGE = (
    SAMPLES
    + """\
{% macro ago(at) %}
<time data-at="{{ at }}">{{ minutes([at_now - at, 0] | max) }}</time>
{%- endmacro %}

{% macro frame(plot) %}
  <svg role="img" aria-label="{{ plot.title }}. {{ plot.about }}" viewBox="0 0 400 230">
    {% for y, label in plot.y_ticks %}
    <line class="axis" x1="50" x2="390" y1="{{ '%.1f' % y }}" y2="{{ '%.1f' % y }}" />
    <text class="tick end" x="44" y="{{ '%.1f' % (y + 4) }}">{{ label }}</text>
    {% endfor %}
    {% for x, label in plot.x_ticks %}
    <text class="tick mid" x="{{ '%.1f' % x }}" y="207">{{ label }}</text>
    {% endfor %}
    <text class="tick mid" x="220" y="225">{{ plot.x_label }}</text>
    {% for bar in plot.bars %}
    <rect class="f{{ bar.number % 3 }}" x="{{ '%.1f' % bar.x }}" y="{{ '%.1f' % bar.y }}"
      width="{{ '%.1f' % bar.width }}" height="{{ '%.2f' % bar.height }}"
      ><title>{{ bar.told }}</title></rect>
    {% endfor %}
    {% for line in plot.lines %}
    <polyline class="l{{ line.number % 2 }}" points="{{ line.path }}" />
    {% for x, y, told in line.dots %}
    <circle class="f{{ line.number % 2 }}" cx="{{ '%.1f' % x }}" cy="{{ '%.1f' % y }}" r="3.2"
      ><title>{{ told }}</title></circle>
    {% endfor %}
    {% endfor %}
  </svg>
{% endmacro %}

{% macro figure(plot) %}
  <figure>
    <figcaption><b>{{ plot.title }}</b><span>{{ plot.about }}</span></figcaption>
    {{ frame(plot) }}
    {% if plot.parts %}
    <p class="key">{% for part in plot.parts %}<span><i class="k{{ loop.index0 % 3 }}"></i>
      {{- part }}</span>{% endfor %}</p>
    {% endif %}
  </figure>
{% endmacro %}

{% macro heads_figure(heads) %}
  {% set about = "How many of the clients' replies had each head, a part of a layer's adapter." %}
  {% set height = [[340 / heads.rows | length, 5] | max, 22] | min %}
  {% set width = 340 / heads.heads %}
  <figure>
    <figcaption><b>How often each head was trained</b><span>{{ about }} Layers from top to bottom
      {%- if heads.layers > heads.rows | length %}, the first {{ heads.rows | length }} of
      {{ heads.layers }}{% endif %}, heads from left to right; at most {{ heads.most }}.</span>
    </figcaption>
    <svg role="img" aria-label="{{ about }}"
      viewBox="0 0 400 {{ '%.0f' % (height * heads.rows | length + 28) }}">
      {% for row in heads.rows %}
      {% set y = loop.index0 * height %}
      {% if height > 11 or loop.index0 % 4 == 0 %}
      <text class="tick end" x="44" y="{{ '%.1f' % (y + height / 2 + 4) }}">{{ loop.index0 }}</text>
      {% endif %}
      {% set layer = loop.index0 %}
      {% for count, share in row %}
      <rect class="cell f0" fill-opacity="{{ share }}" x="{{ '%.1f' % (50 + loop.index0 * width) }}"
        y="{{ '%.1f' % y }}" width="{{ '%.1f' % width }}" height="{{ '%.1f' % height }}"
        ><title>layer {{ layer }}, head {{ loop.index0 }}: {{ count }}</title></rect>
      {% endfor %}
      {% endfor %}
      <text class="tick mid" x="220" y="{{ '%.0f' % (height * heads.rows | length + 20) }}"
        >head</text>
    </svg>
  </figure>
{% endmacro %}

<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<noscript><meta http-equiv="refresh" content="5"></noscript>
<title>{{ heading }}</title>
<style>{{ style }}</style>
</head>
<body>
<main data-version="{{ version }}">
<p class="lost" id="lost" hidden>No answer from ravan-flwr watch: this is what it showed last. Start
it again to go on.</p>
{% if problem %}
<section id="state" class="failed"><header><h1>{{ name }}</h1></header>
<div class="state"><span class="word">cannot be shown</span>{{ problem }}</div></section>
{% for part in ("facts", "pictures", "samples", "people", "rejected", "log", "settings") %}
<section id="{{ part }}"></section>
{% endfor %}
{% else %}
<section id="state" class="{{ now.word }}">
<header><h1>{{ title }}</h1><span class="note">{{ name }}</span></header>
<div class="state"><span class="word">{{ now.word }}</span>{{ now.text }}
{%- if now.since is not none %} {{ ago(now.since) }}.{% endif %}
{% if now.advice %}<p class="note">{{ now.advice }}</p>{% endif %}
<progress max="1" value="{{ '%.4f' % now.done }}" aria-label="rounds done"></progress></div>
</section>

<section id="facts"><dl class="facts">
  {% for name, value in facts.items() %}
  <div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
  {% endfor %}
</dl></section>

<section id="pictures">
{% if plots %}
<div class="grid">
{% for plot in plots %}
{{ figure(plot) }}
{% endfor %}
{% if heads %}
{{ heads_figure(heads) }}
{% endif %}
</div>
{% endif %}
</section>

<section id="samples">
{% if samples %}
<h2>What the model writes</h2>
<p class="note">The same test examples at each evaluation, which nobody trains on.</p>
{{ samples_of(samples) }}
{% endif %}
</section>

<section id="people">
<h2>Who takes part</h2>
{% if people.listed %}
<p class="note">A client is named by its partition of the data. Its budget is the share of the
adapter that it can train. Bytes are those of the replies that were used.
{%- if people.more %} There is room for {{ people.listed | length }}: those at work, and those that
took part last.{% endif %}
{%- if people.missing %} {{ people.missing }} more partition{{ "" if people.missing == 1 else "s" }}
{{ "has" if people.missing == 1 else "have" }} not been seen.{% endif %}</p>
<div class="wide"><table class="people">
<thead><tr><th scope="col">client</th><th scope="col">now</th><th scope="col">last heard of</th>
<th scope="col">device</th><th scope="col">budget</th><th scope="col">examples</th>
<th scope="col">rounds</th><th scope="col">heads</th><th scope="col">seconds</th>
<th scope="col">up</th><th scope="col">down</th></tr></thead>
<tbody>
{% for one in people.listed %}
<tr><th scope="row">{{ one.partition }}</th>
<td class="whole long{{ ' busy' if one.now == 'at work' else '' }}" data-label="now">
  {{- one.now }}
  {%- if one.rejected %}<span class="why">rejected {{ one.rejected }} time
    {{- "" if one.rejected == 1 else "s" }}, {{ one.reason }}</span>{% endif %}</td>
<td class="whole" data-label="last heard of">
  {%- if one.heard %}{{ ago(one.heard) }} ago{% endif %}</td>
<td class="long" data-label="device">{{ one.device }}</td>
<td data-label="budget">{{ one.budget }}</td>
<td data-label="examples">{{ one.examples }}</td>
<td data-label="rounds">{{ one.rounds }}{% if one.last_round %} (last {{ one.last_round }})
  {%- endif %}</td>
<td data-label="heads">{{ one.heads }}</td><td data-label="seconds">{{ one.seconds }}</td>
<td data-label="up">{{ one.up if one.rounds else "" }}</td>
<td data-label="down">{{ one.down if one.rounds else "" }}</td></tr>
{% endfor %}
</tbody></table></div>
{% if people.more %}<p class="note">And {{ people.more }} more clients.</p>{% endif %}
{% else %}
<p>Nobody yet.</p>
{% endif %}
{% if refused %}
<h2>Refused nodes</h2>
<div class="wide"><table><tr><th scope="col">node</th><th scope="col">reason</th></tr>
{% for one in refused[:50] %}
<tr><th scope="row">{{ one.node }}</th><td class="long">{{ one.reason }}</td></tr>
{% endfor %}
</table></div>
{% if refused | length > 50 %}<p class="note">And {{ refused | length - 50 }} more.</p>{% endif %}
{% endif %}
</section>

<section id="rejected">
<h2>Rejected replies</h2>
{% if rejected %}
<p class="note">The server checks each reply, and does not use one that is damaged, too late or out
of bounds. {% if rejections > rejected | length %}The last {{ rejected | length }} of
{{ rejections }}:{% endif %}</p>
<div class="wide"><table>
<tr><th scope="col">round</th><th scope="col">client</th><th scope="col">reason</th></tr>
{% for number, client, reason in rejected %}
<tr><th scope="row">{{ number }}</th><td>{{ client }}</td><td class="long">{{ reason }}</td></tr>
{% endfor %}
</table></div>
{% else %}
<p>None.</p>
{% endif %}
</section>

<section id="log">
<h2>Log</h2>
{% if log %}
<div class="log" tabindex="0"><pre>{% for line, warns in log %}
{% if warns %}<span class="warn">{{ line }}</span>{% else %}{{ line }}{% endif %}
{{ "\n" }}{% endfor %}</pre></div>
{% else %}
<p>None: a run of an earlier version keeps no log.</p>
{% endif %}
</section>

<section id="settings">
<details><summary>Settings</summary>
<div class="wide"><table>
{% for name, value in settings %}
<tr><th scope="row">{{ name }}</th><td class="long">{{ value }}</td></tr>
{% endfor %}
</table></div>
<p>{{ path }}</p>
</details>
</section>
{% endif %}
</main>
<script>{{ script }}</script>
</body>
</html>
"""
)
