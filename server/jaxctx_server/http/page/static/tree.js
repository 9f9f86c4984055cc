// The fork tree: a row a context, with its pages as cells. A page that several contexts hold has one colour wherever it
// is, and between rows that follow each other its cells are joined.
"use strict"

import { byId, count, counted, element, setText, shortId, svgElement } from "./dom.js"

const ROW = 34, CELL = 16, TOP = (ROW - CELL) / 2 // heights, in pixels
const LARGEST_PITCH = 20, SMALLEST_PITCH = 4 // widths of a cell and the gap behind it
const TIER_HEIGHTS = { d: 1, h: 0.55, k: 0.3, l: 1 } // the further away a page is, the lower its cell
const TIER_NAMES = { h: "in the host’s memory", k: "on disk", l: "as tokens only" }
const MAX_INDENT = 6

export class Tree {
  #contexts
  #rows = new Map() // of each context: { item, head, strip, key }
  #list = byId("tree")
  #planned = false
  selected = null
  onSelect = () => {}
  #detail

  constructor(contexts, detail) {
    this.#contexts = contexts
    this.#detail = detail
    new ResizeObserver(() => this.draw()).observe(this.#list)
    this.#list.addEventListener("keydown", event => this.#onKey(event))
  }

  /** Draw at the next frame, however often this is called until then. */
  draw() {
    if (this.#planned) return
    this.#planned = true
    requestAnimationFrame(() => {
      this.#planned = false
      this.#drawNow()
    })
  }

  /** Select a context; null: none. */
  select(id) {
    this.selected = id
    this.onSelect(id)
    this.draw()
  }

  #drawNow() {
    const rows = this.#contexts.rows(), ids = new Set(rows.map(row => row.context.context_id))
    byId("no-contexts").hidden = rows.length > 0
    const { held, shared } = this.#contexts.totals()
    const limit = this.#contexts.leftOut ? `the ${rows.length} used last · ` : rows.length ? `${rows.length} · ` : ""
    setText(byId("contexts-count"), rows.length ? `${limit}${counted(held, "page")}, ${count(shared)} shared` : "")
    for (const [id, row] of this.#rows) {
      if (ids.has(id)) continue
      row.item.remove()
      this.#rows.delete(id)
    }
    if (this.selected && !ids.has(this.selected)) this.select(null)
    const width = this.#stripWidth()
    const { stride, longest } = this.#contexts.stride(Math.max(8, Math.floor(width / SMALLEST_PITCH)))
    const pitch = Math.max(SMALLEST_PITCH, Math.min(LARGEST_PITCH, Math.floor(width / longest)))
    byId("scale").hidden = stride === 1
    setText(byId("scale"), stride === 1 ? "" : `one cell is ${stride} pages`)
    const cells = rows.map(row => this.#contexts.cells(row.context.context_id, stride))
    rows.forEach((row, i) => this.#drawRow(row, i, cells, pitch, width))
    this.#placeDetail()
  }

  #stripWidth() {
    const strip = this.#list.querySelector(".strip")
    return Math.max(60, strip ? strip.clientWidth : this.#list.clientWidth * 0.5)
  }

  #drawRow(row, i, allCells, pitch, width) {
    const { context } = row, id = context.context_id
    const known = this.#rows.get(id) ?? this.#newRow(id)
    if (this.#list.children[i] !== known.item) this.#list.insertBefore(known.item, this.#list.children[i] ?? null)
    const isSelected = id === this.selected
    const joinsAbove = i > 0 && allCells[i - 1].length > 0 && this.#idAt(i - 1) !== this.selected ? allCells[i - 1] : []
    const joinsBelow = isSelected ? [] : allCells[i + 1] ?? []
    const drawn = drawing(context, allCells[i], joinsAbove, joinsBelow, pitch)
    const key = JSON.stringify([context, row.lines, row.isLast, isSelected, pitch, width, drawn, this.#contexts.colour(id)])
    if (key === known.key) return
    known.key = key
    known.head.setAttribute("aria-expanded", String(isSelected))
    known.item.classList.toggle("selected", isSelected)
    known.item.dataset.state = context.state
    known.head.replaceChildren(...this.#headParts(row))
    known.strip.replaceChildren(...strip(drawn))
    known.strip.setAttribute("width", String(width))
    known.strip.setAttribute("viewBox", `0 0 ${width} ${ROW}`)
    known.strip.setAttribute("aria-label", pagesInWords(context, allCells[i]))
  }

  #idAt(i) {
    return this.#list.children[i]?.dataset.id
  }

  #newRow(id) {
    const head = element("button", { class: "name", type: "button", "aria-controls": "detail" })
    const picture = svgElement("svg", { class: "strip", height: String(ROW), role: "img", preserveAspectRatio: "xMinYMid" })
    const line = element("div", { class: "line" }, head, picture)
    const item = element("li", { "data-id": id }, line)
    line.addEventListener("click", () => this.select(this.selected === id ? null : id))
    const row = { item, head, strip: picture, key: "" }
    this.#rows.set(id, row)
    return row
  }

  #headParts({ context, lines, isLast, depth }) {
    const id = context.context_id, guides = element("span", { class: "guides", "aria-hidden": "true" })
    lines.slice(1, MAX_INDENT).forEach((_, i) => guides.append(element("i", { class: lines[i] ? "pipe" : "" })))
    if (depth > 0) guides.append(element("i", { class: isLast ? "end" : "tee" }))
    const of = context.parent_id ? `, fork of ${shortId(context.parent_id)} at token ${context.forked_at}` : ""
    const parts = [
      guides,
      element("span", { class: `dot c${this.#contexts.colour(id)}`, "aria-hidden": "true" }),
      element("span", { class: "id", title: id }, shortId(id)),
      element("span", { class: "hidden" }, `${of}, ${context.state}`),
    ]
    const origin = context.snapshot ? `opened from ${context.snapshot}` : ""
    if (origin) parts.push(element("span", { class: "tag", title: origin }, context.snapshot))
    const switches = context.adapter_spans.map((span) => `${span.adapter || "no adapter"} from token ${span.start}`)
    if (context.adapter || switches.length) {
      const title = switches.join(", ") || `adapter ${context.adapter}`
      parts.push(element("span", { class: "tag", title }, context.adapter || "no adapter"))
    }
    if (context.pinned) parts.push(element("span", { class: "tag" }, "pinned"))
    if (context.state === "suspended") parts.push(element("span", { class: "tag" }, "suspended"))
    parts.push(element("span", { class: "tokens" }, count(context.seq_len + context.buffered_tokens)))
    return parts
  }

  /** The detail of the selected context stands below its row. */
  #placeDetail() {
    const row = this.#rows.get(this.selected)
    if (!row) this.#detail.remove()
    else if (this.#detail.parentElement !== row.item) row.item.append(this.#detail)
  }

  #onKey(event) {
    if (!event.target.classList.contains("name")) return
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key]
    if (step === undefined) return
    const heads = [...this.#list.querySelectorAll(".name")]
    heads[heads.indexOf(event.target) + step]?.focus()
    event.preventDefault()
  }
}

/** What a strip shows: for each look of cells their outlines as one path, and what joins them to the rows beside. */
function drawing(context, cells, above, below, pitch) {
  const gap = pitch >= 8 ? 2 : 1, paths = new Map()
  const add = (look, path, page) => {
    const known = paths.get(look) ?? { path: "", count: 0, first: page }
    known.path += path
    known.count++
    paths.set(look, known)
  }
  const filled = context.working_tokens % context.page_size
  cells.forEach((cell, i) => {
    const x = i * pitch, width = pitch - gap, height = CELL * TIER_HEIGHTS[cell.tier]
    const colour = cell.kind === "unread" ? "" : ` c${cell.colour}`
    if (cell.kind === "shared") {
      if (above[i]?.page === cell.page) add(`join${colour}`, `M${x} 0h${width}v${TOP}h${-width}z`, cell.page)
      if (below[i]?.page === cell.page) add(`join${colour}`, `M${x} ${TOP + CELL}h${width}v${TOP}h${-width}z`, cell.page)
    }
    const isPartial = i === cells.length - 1 && filled > 0 && cell.kind === "private"
    const body = `M${x + 0.5} ${TOP + CELL - height + 0.5}h${width - 1}v${height - 1}h${1 - width}z`
    add(`${isPartial ? "partial" : cell.kind}${colour} tier-${cell.tier}`, body, cell.page)
    if (isPartial) {
      const part = Math.max(1, Math.round((width - 1) * filled / context.page_size))
      add(`private${colour} part`, `M${x + 0.5} ${TOP + 0.5}h${part}v${CELL - 1}h${-part}z`, cell.page)
    }
  })
  return [...paths].map(([look, { path, count: pages, first }]) => ({ look, path, pages, first }))
}

function strip(drawn) {
  return drawn.map(({ look, path, pages, first }) =>
    svgElement("path", { class: look, d: path, "data-cells": String(pages), "data-first": String(first) }))
}

/** "12 pages: 8 shared, 4 private". */
function pagesInWords(context, cells) {
  if (!context.pages && !cells.length) return "no pages"
  const of = kind => cells.filter(cell => cell.kind === kind).length
  const words = [`${of("shared")} shared`, `${of("private")} private`]
  for (const [tier, name] of Object.entries(TIER_NAMES)) {
    const there = cells.filter(cell => cell.tier === tier).length
    if (there) words.push(`${there} ${name}`)
  }
  return `${counted(cells.length, "cell")} of ${counted(Math.max(context.pages, cells.length), "page")}: ${words.join(", ")}`
}
