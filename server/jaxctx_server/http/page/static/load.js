// Load and memory: tokens a second, requests, and bars of the pages in each tier. What a key may not see is left out.
"use strict"

import { byId, count, counted, element, setText, svgElement } from "./dom.js"

const SAMPLES = 120, SAMPLE_MS = 500
const WIDTH = 240, HEIGHT = 44

export class Load {
  #contexts
  #engines = null // null: the key may not see them
  #generated = null // tokens generated in all, at the last sample
  #sampledAt = 0
  #rates = new Array(SAMPLES).fill(0)
  #line = svgElement("polyline", { class: "line" })
  #area = svgElement("polygon", { class: "area" })
  #rate = element("span", { class: "big" }, "0")
  #facts = element("dl", { class: "facts" })
  #shown = ""

  constructor(contexts) {
    this.#contexts = contexts
    const picture = svgElement("svg", {
      class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      "aria-label": "Tokens a second over the last minute",
    }, this.#area, this.#line)
    byId("load").append(element("p", { class: "rate" }, this.#rate, " tokens/s"), picture, this.#facts)
    setInterval(() => document.hidden || this.#sample(), SAMPLE_MS)
  }

  /** The event `engines`; null: the key may not see them. */
  apply(engines) {
    this.#engines = engines
    if (this.#generated === null) this.#sample()
    this.draw()
  }

  /** A connection ended: what was counted meanwhile is no rate. */
  forget() {
    this.#generated = null
  }

  #sample() {
    const now = performance.now(), generated = this.#generatedNow()
    const seconds = (now - this.#sampledAt) / 1000
    const isKnown = this.#generated !== null && generated >= this.#generated && seconds > 0
    this.#rates.push(isKnown ? (generated - this.#generated) / seconds : 0)
    this.#rates.shift()
    this.#generated = generated
    this.#sampledAt = now
    const recent = this.#rates.slice(-4)
    const rate = recent.reduce((sum, each) => sum + each, 0) / recent.length
    setText(this.#rate, rate >= 10 ? count(rate) : rate.toFixed(1).replace(".0", ""))
    this.#drawRates()
  }

  #generatedNow() {
    if (this.#engines) return this.#engines.reduce((sum, engine) => sum + engine.tokens_generated, 0)
    let tokens = 0
    for (const context of this.#contexts.contexts.values()) tokens += context.seq_len + context.buffered_tokens
    return tokens
  }

  #drawRates() {
    const most = Math.max(10, ...this.#rates)
    const points = this.#rates.map((rate, i) =>
      `${(i * WIDTH / (SAMPLES - 1)).toFixed(1)},${(HEIGHT - 1 - rate / most * (HEIGHT - 4)).toFixed(1)}`)
    this.#line.setAttribute("points", points.join(" "))
    this.#area.setAttribute("points", `0,${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`)
  }

  draw() {
    const shown = JSON.stringify([this.#engines, this.#engines ? 0 : this.#ownFacts()])
    if (shown === this.#shown) return
    this.#shown = shown
    if (this.#engines) this.#drawEngines()
    else this.#drawOwn()
  }

  #drawEngines() {
    const sum = field => this.#engines.reduce((total, engine) => total + engine[field], 0)
    const cached = sum("tokens_cached"), prompt = cached + Math.max(0, sum("tokens_computed") - sum("tokens_generated"))
    this.#facts.replaceChildren(
      fact("running", count(sum("running")), "requests in the batch"),
      fact("waiting", count(sum("waiting")), "requests that wait for a place in it"),
      fact("contexts", count(sum("contexts")), "of all tenants"),
      fact("from cache", prompt ? `${Math.round(100 * cached / prompt)} %` : "–", "of all prompt tokens so far"),
    )
    const several = this.#engines.length > 1
    setText(byId("memory-unit"), several ? `${this.#engines.length} engines` : this.#engines.length ? pageUnit(this.#engines[0]) : "")
    const none = element("p", { class: "muted" }, "No engine has registered with this router yet.")
    byId("memory").replaceChildren(...(this.#engines.length ? this.#engines.map(engine => engineBars(engine, several)) : [none]))
  }

  #ownFacts() {
    const { held, shared } = this.#contexts.totals()
    const all = [...this.#contexts.contexts.values()]
    return { held, shared, contexts: all.length, busy: all.filter(context => context.state === "busy").length }
  }

  #drawOwn() {
    const { held, shared, contexts, busy } = this.#ownFacts()
    this.#facts.replaceChildren(
      fact("busy", count(busy), "of your contexts"), fact("contexts", count(contexts), "yours"),
    )
    setText(byId("memory-unit"), "yours")
    byId("memory").replaceChildren(
      bar("Pages of your contexts", [["shared", shared, "shared"], ["held", held - shared, "private"]], held),
      element("p", { class: "muted note" }, "The engines’ load and memory are open to keys of role admin."),
    )
  }
}

const pageUnit = engine => `pages of ${engine.page_size} tokens`

function fact(name, value, title) {
  return element("div", { title }, element("dt", {}, name), element("dd", {}, value))
}

function engineBars(engine, isNamed) {
  const bars = [bar("Device", [
    ["held", engine.pages_held, "held"], ["cached", engine.pages_cached, "cached"], ["free", engine.pages_free, "free"],
  ], engine.pages_total)]
  for (const [tier, name] of [["host", "Host memory"], ["disk", "Disk"]]) {
    const total = engine[`${tier}_pages_total`], used = engine[`${tier}_pages_used`]
    if (total) bars.push(bar(name, [["cached", used, "used"], ["free", total - used, "free"]], total))
  }
  if (bars.length === 1) bars.push(element("p", { class: "muted note" }, "No tier below it: pages leave the device only by eviction."))
  const state = engine.draining ? " · draining" : ""
  const name = `${engine.engine_id} · ${engine.running} running, ${engine.waiting} waiting${state}`
  return element("div", { class: "engine" }, isNamed ? element("h3", {}, name) : null, ...bars)
}

/** A bar of parts, each a class, a number of pages and a word. */
function bar(name, parts, total) {
  const picture = element("div", { class: "stack", "aria-hidden": "true" })
  for (const [look, pages] of parts) {
    if (!pages) continue
    const part = element("i", { class: look })
    part.style.flexGrow = String(pages)
    picture.append(part)
  }
  const legend = element("ul", { class: "amounts" }, ...parts.map(([look, pages, word]) =>
    element("li", {}, element("i", { class: look, "aria-hidden": "true" }), `${count(pages)} ${word}`)))
  return element("div", { class: "tier" },
    element("p", { class: "tier-name" }, element("span", {}, name), element("span", { class: "muted" }, counted(total, "page"))),
    picture, legend)
}
