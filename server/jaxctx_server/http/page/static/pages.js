// Contexts and their pages as they were last heard of: the order of the fork tree, and who shares which page.
//
// Page ids count for one engine. A page is known here by one number: the engine's place in a list, then the id.
"use strict"

const COLOURS = 8
const ENGINE = 2 ** 32
const SHARED_WITH_UNSEEN = 1 // a page that more contexts hold than are drawn has more holders than this

export class Contexts {
  contexts = new Map()
  pages = new Map() // of each context: { count, stride, ids, refcounts, tiers }
  leftOut = false
  #engines = []
  #colours = new Map()
  #holders = null // of each page: { count, owner }

  /** The event `contexts`. */
  apply({ reset, changed, removed, left_out }) {
    if (reset) {
      this.contexts.clear()
      this.pages.clear()
    }
    for (const id of removed) {
      this.contexts.delete(id)
      this.pages.delete(id)
      this.#colours.delete(id)
    }
    for (const context of changed) this.contexts.set(context.context_id, context)
    this.leftOut = left_out
    this.#holders = null
  }

  /** A context of which the events have not told yet. */
  add(context) {
    this.contexts.set(context.context_id, context)
  }

  /** The event `pages`. */
  applyPages(read) {
    for (const each of read) {
      const context = this.contexts.get(each.context_id)
      if (!context) continue
      const engine = this.#engine(context.engine_id)
      this.pages.set(each.context_id, { ...each, ids: each.page_ids.map(id => engine * ENGINE + id) })
    }
    this.#holders = null
  }

  #engine(id) {
    if (!this.#engines.includes(id)) this.#engines.push(id)
    return this.#engines.indexOf(id)
  }

  /** The colour of a context, 0 to 7: not that of its parent, and the same for as long as it is known. */
  colour(id) {
    if (!this.#colours.has(id)) {
      const used = new Array(COLOURS).fill(0)
      for (const colour of this.#colours.values()) used[colour]++
      let weight = 1e6 // of the parent; an ancestor's colour may come again further down
      for (let at = this.#parent(id); at && weight > 1e3; at = this.#parent(at), weight /= 2) {
        if (this.#colours.has(at)) used[this.#colours.get(at)] += weight
      }
      this.#colours.set(id, used.indexOf(Math.min(...used)))
    }
    return this.#colours.get(id)
  }

  /** For each page: how many drawn contexts hold it, and the oldest of them, which gives it its colour. */
  holders() {
    if (this.#holders) return this.#holders
    const found = new Map()
    const oldestFirst = [...this.pages.keys()].sort((a, b) => this.#age(a) - this.#age(b) || this.#depth(a) - this.#depth(b))
    for (const id of oldestFirst) {
      for (const page of this.pages.get(id).ids) {
        const holder = found.get(page)
        if (holder) holder.count++
        else found.set(page, { count: 1, owner: id })
      }
    }
    return this.#holders = found
  }

  #parent(id) {
    return this.contexts.get(id)?.parent_id
  }

  #age(id) {
    return this.contexts.get(id)?.created_at ?? 0
  }

  #depth(id) {
    let depth = 0
    for (let at = this.contexts.get(id); at?.parent_id && depth < 100; at = this.contexts.get(at.parent_id)) depth++
    return depth
  }

  /** Distinct pages that the drawn contexts hold, and how many of them more than one holds. */
  totals() {
    let held = 0, shared = 0
    for (const { count } of this.holders().values()) {
      held++
      if (count > 1) shared++
    }
    return { held, shared }
  }

  /** The rows of the tree: newest roots first, below each its forks in their order. `lines`: which guides pass a row. */
  rows() {
    const children = new Map()
    const roots = []
    for (const context of this.contexts.values()) {
      const parent = context.parent_id
      if (parent && parent !== context.context_id && this.contexts.has(parent)) {
        if (!children.has(parent)) children.set(parent, [])
        children.get(parent).push(context)
      } else roots.push(context)
    }
    const older = (a, b) => a.created_at - b.created_at || (a.context_id < b.context_id ? -1 : 1)
    const rows = []
    const add = (context, lines, isLast) => {
      rows.push({ context, lines, isLast, depth: lines.length })
      const forks = (children.get(context.context_id) ?? []).sort(older)
      forks.forEach((fork, i) => add(fork, [...lines, i < forks.length - 1], i === forks.length - 1))
    }
    roots.sort(older).reverse().forEach(root => add(root, [], true))
    return rows
  }

  /** Pages a cell stands for, so that the longest context has at most `cells` of them: a power of two. */
  stride(cells) {
    let longest = 1, stride = 1
    for (const context of this.contexts.values()) longest = Math.max(longest, context.pages)
    for (const pages of this.pages.values()) stride = Math.max(stride, pages.stride)
    while (longest / stride > cells) stride *= 2
    return { stride, longest: Math.ceil(longest / stride) }
  }

  /** The cells of a context: for every `stride`-th page its number, colour, whether it is shared, and its tier. */
  cells(id, stride) {
    const context = this.contexts.get(id), pages = this.pages.get(id)
    if (!pages) return Array.from({ length: Math.ceil(context.pages / stride) }, () => ({ page: null, kind: "unread", tier: "d" }))
    const holders = this.holders(), step = Math.max(1, stride / pages.stride), cells = []
    for (let i = 0; i < Math.max(pages.ids.length, pages.tiers.length); i += step) {
      const page = pages.ids[i] ?? null, holder = holders.get(page)
      const isShared = holder !== undefined && (holder.count > 1 || pages.refcounts[i] > SHARED_WITH_UNSEEN)
      const tier = pages.tiers[i] ?? "d"
      const kind = page === null || tier === "l" ? "away" : isShared ? "shared" : "private"
      cells.push({ page, kind, tier, colour: this.colour(holder?.owner ?? id) })
    }
    return cells
  }
}
