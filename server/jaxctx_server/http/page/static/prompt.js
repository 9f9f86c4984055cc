// The box for prompts, and what is shown of the selected context: its text, what is streamed into it, what can be done.
"use strict"

import { byId, count, counted, element, setText, shortId, showMessage } from "./dom.js"
import { ask, events } from "./server.js"

const REREAD_MS = 800 // between two readings of a text that something else writes

export class Prompt {
  #contexts
  #tree
  #running = null // AbortController of the stream on its way
  #written = new Map() // of contexts that were streamed into: what is shown below their text
  #read = { id: null, length: -1, at: 0 }
  #readTimer = 0
  #text = element("pre", { class: "text", tabindex: "0", "aria-label": "Text of the context" })
  #facts = element("p", { class: "muted facts-line" })
  #output = element("div", { class: "output", "aria-live": "polite", "aria-atomic": "false" })
  #buttons = element("div", { class: "actions" })
  detail = element("div", { class: "detail", id: "detail", role: "region", "aria-label": "The selected context" })

  constructor(contexts) {
    this.#contexts = contexts
    const act = (text, look, action) => {
      const button = element("button", { type: "button", class: look }, text)
      button.addEventListener("click", action)
      return button
    }
    this.#buttons.append(
      act("Continue", "quiet", () => this.#aim("continue")), act("Fork", "quiet", () => this.#aim("fork")),
      act("Close", "quiet danger", () => this.#close()))
    this.detail.append(element("div", { class: "detail-head" }, this.#facts, this.#buttons), this.#text, this.#output)
    byId("prompt").addEventListener("submit", event => {
      event.preventDefault()
      if (this.#running) this.#running.abort()
      else this.#run()
    })
    byId("prompt-text").addEventListener("keydown", event => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.#running) byId("prompt").requestSubmit()
    })
  }

  /** The tree whose selection the prompt goes to. */
  attach(tree) {
    this.#tree = tree
    tree.onSelect = id => this.#onSelect(id)
  }

  #onSelect(id) {
    for (const name of document.querySelectorAll(".target-id")) setText(name, id ? shortId(id) : "")
    for (const target of ["continue", "fork"]) radio(target).disabled = !id
    if (!id) radio("new").checked = true
    else if (radio("new").checked) radio("continue").checked = true
    this.#output.replaceChildren(...(this.#written.get(id) ?? []))
    this.#output.hidden = !this.#written.has(id)
    this.#text.hidden = false
    if (this.#read.id !== id) setText(this.#text, "")
    this.#read = { id, length: -1, at: 0 }
    this.update()
  }

  /** The contexts changed: the facts of the selected one, and its text if something else wrote it. */
  update() {
    const context = this.#contexts.contexts.get(this.#tree.selected)
    if (!context) return
    setText(this.#facts, facts(context))
    const length = context.seq_len + context.buffered_tokens
    if (this.#written.has(context.context_id) || this.#read.length === length) return
    clearTimeout(this.#readTimer)
    const wait = Math.max(0, this.#read.at + REREAD_MS - performance.now())
    this.#readTimer = setTimeout(() => this.#readText(context.context_id, length), wait)
  }

  async #readText(id, length) {
    if (this.#tree.selected !== id || document.hidden) return
    this.#read = { id, length, at: performance.now() }
    const said = await ask(`page/context/${encodeURIComponent(id)}`).catch(() => null)
    if (!said || this.#tree.selected !== id || this.#written.has(id)) return
    const before = said.skipped ? `… ${counted(said.skipped, "token")} before …\n` : ""
    setText(this.#text, before + said.text || "Nothing in it yet.")
    this.#text.scrollTop = this.#text.scrollHeight
  }

  #aim(target) {
    radio(target).checked = true
    byId("prompt-text").focus()
  }

  async #close() {
    const id = this.#tree.selected
    try {
      await ask(`page/context/${encodeURIComponent(id)}`, { method: "DELETE" })
    } catch (error) {
      showMessage(byId("prompt-error"), error.message)
    }
  }

  #body() {
    const target = document.querySelector("input[name=target]:checked").value
    const number = name => (byId(name).value === "" ? null : Number(byId(name).value))
    return {
      context_id: target === "continue" ? this.#tree.selected : null,
      fork_of: target === "fork" ? this.#tree.selected : null,
      text: byId("prompt-text").value,
      as_message: byId("as-message").checked,
      branches: number("branches"),
      max_tokens: number("max-tokens"),
      temperature: number("temperature"),
    }
  }

  async #run() {
    const body = this.#body(), error = byId("prompt-error")
    this.#running = new AbortController()
    showMessage(error, "")
    setText(byId("send"), "Stop")
    let writing = null
    try {
      for await (const { type, data } of events("page/prompt", { method: "POST", body, signal: this.#running.signal })) {
        if (type === "begin") writing = await this.#begin(data, body)
        else if (type === "part") writing.add(data)
        else if (type === "end") writing.end(data)
      }
    } catch (failure) {
      if (failure.name !== "AbortError") showMessage(error, failure.message)
    } finally {
      this.#running = null
      writing?.stop()
      setText(byId("send"), "Run")
    }
  }

  /** The context is there: show what it held before, and below it what was asked and what comes. */
  async #begin({ context_id: id, cached_tokens: cached, computed_tokens: computed }, body) {
    const from = body.context_id ?? body.fork_of, before = []
    if (body.context_id === id && this.#written.has(id)) before.push(...this.#written.get(id))
    else if (from) {
      const said = this.#read.id === from && !this.#written.has(from) ? this.#text.textContent : ""
      if (said) before.push(element("pre", { class: "before" }, said))
      else before.push(...[...(this.#written.get(from) ?? [])].map(each => each.cloneNode(true)))
    }
    const writing = new Writing(body, branch => this.#tree.select(branch), cached === undefined ? "" : cost(cached, computed))
    this.#written.set(id, [...before, ...writing.elements])
    byId("prompt-text").value = ""
    if (!this.#contexts.contexts.has(id)) this.#contexts.add(placeholder(id, body))
    this.#tree.select(id)
    for (const text of before) requestAnimationFrame(() => { text.scrollTop = text.scrollHeight })
    if (body.fork_of) radio("continue").checked = true
    this.#text.hidden = true
    return writing
  }
}

/** A context that was made and of which the watch has not told yet. */
function placeholder(id, body) {
  const now = Date.now()
  return {
    context_id: id, parent_id: body.fork_of ?? (body.branches > 1 ? body.context_id : null), model_id: "", state: "busy",
    seq_len: 0, buffered_tokens: 0, pages: 0, committed_pages: 0, working_tokens: 0, page_size: 1, priority: 0,
    pinned: false, created_at: now, used_at: now, expires_at: null, labels: {}, forked_at: 0, snapshot: "", engine_id: "",
    adapter: "", adapter_spans: [],
  }
}

/** What one prompt writes: the prompt, and a text for each branch. */
class Writing {
  elements = []
  #branches = []

  constructor(body, select, promptCost) {
    if (body.text) this.elements.push(element("pre", { class: "said" }, body.text))
    if (promptCost) this.elements.push(element("p", { class: "usage" }, `prompt: ${promptCost}`))
    const grid = element("div", { class: body.branches > 1 ? "branches" : "single" })
    for (let i = 0; i < (body.branches ?? 1); i++) {
      const text = element("pre", { class: "made writing" }), usage = element("p", { class: "usage" })
      const name = element("button", { type: "button", class: "branch-name", hidden: body.branches > 1 ? null : "" }, `Branch ${i + 1}`)
      name.addEventListener("click", () => name.dataset.id && select(name.dataset.id))
      this.#branches.push({ text, usage, name })
      grid.append(element("div", { class: "branch" }, name, text, usage))
    }
    this.elements.push(grid)
  }

  add({ index, context_id: id, text }) {
    const branch = this.#branches[index]
    const isAtEnd = branch.text.scrollTop + branch.text.clientHeight >= branch.text.scrollHeight - 4
    branch.name.dataset.id = id
    branch.text.append(text)
    if (isAtEnd) branch.text.scrollTop = branch.text.scrollHeight
  }

  end(data) {
    const branch = this.#branches[data.index]
    branch.name.dataset.id = data.context_id
    setText(branch.name, `Branch ${data.index + 1} · ${shortId(data.context_id)}`)
    branch.text.classList.remove("writing")
    const why = data.finish === "length" ? "token limit" : "end of text"
    setText(branch.usage, `${counted(data.completion_tokens, "token")} · ${why} · ${cost(data.cached_tokens, data.computed_tokens)}`)
  }

  stop() {
    for (const { text } of this.#branches) text.classList.remove("writing")
  }
}

const radio = value => document.querySelector(`input[name=target][value=${value}]`)
const cost = (cached, computed) => `${count(cached)} cached, ${count(computed)} computed`

/** The line of facts of a context. */
function facts(context) {
  const words = [
    counted(context.seq_len + context.buffered_tokens, "token"),
    counted(context.pages, "page"),
    context.state,
  ]
  if (context.parent_id) words.push(`forked from ${shortId(context.parent_id)} at ${count(context.forked_at)}`)
  if (context.expires_at) words.push(`ends ${new Date(context.expires_at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })}`)
  if (context.priority) words.push(`priority ${context.priority}`)
  if (context.engine_id && context.engine_id !== "local") words.push(context.engine_id)
  for (const [name, value] of Object.entries(context.labels)) words.push(`${name}=${value}`)
  return words.join(" · ")
}
