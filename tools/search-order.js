// The search's worker lists ten entries at a time, those first that have the words most often. This one asks it for all of them, and lists
// first those whose title, or list of other words, has every word typed; of both guides before what is public; and after all of these internals
{
  const Unordered = window.Worker
  window.Worker = class {
    constructor(url) {
      const worker = new Unordered(url), asked = []
      let items, terms, typed, latest, found
      const place = ({ id }) => {
        const named = terms(`${items[id].title} ${items[id].words || ""}`)
        const inTitle = typed.every(word => named.some(name => name.startsWith(word)))
        return (items[id].tier == 2 ? 20 : items[id].tier) + (inTitle ? 0 : 10)
      }
      const ask = (data, ours) => { asked.push(ours); worker.postMessage(data) }
      const show = ({ size = 10, from = 0 }) => {
        const next = from + size < found.items.length ? { size, from: from + size } : undefined
        const pagination = { total: found.items.length, prev: from ? { size, from: from - size } : undefined, next }
        this.onmessage({ data: { type: 3, data: { ...found, pagination, items: found.items.slice(from, from + size) } } })
      }
      worker.onmessage = ({ data }) => {
        if (data.type !== 3) return this.onmessage({ data })
        const query = asked.shift(), { items: more, pagination } = data.data
        if (query !== latest) return                        // more has been typed since
        found = { ...data.data, items: [...(pagination.prev ? found.items : []), ...more] }
        if (pagination.next) return ask({ type: 2, data: { ...query, page: pagination.next } }, query)
        found.items = found.items.map(item => [place(item), item]).sort(([a], [b]) => a - b).map(([, item]) => item)
        show({})
      }
      worker.onerror = e => this.onerror && this.onerror(e)
      worker.onmessageerror = e => this.onmessageerror && this.onmessageerror(e)
      this.terminate = () => worker.terminate()
      this.postMessage = data => {
        if (data.type === 0) {
          const separator = new RegExp(data.data.config.separator, "u")
          terms = text => text.replace(/<[^>]*>/g, "").normalize("NFKD").toLowerCase().split(separator).filter(Boolean)
          items = data.data.items
        }
        if (data.type !== 2) return worker.postMessage(data)
        if (data.data.page) return show(data.data.page)
        latest = data.data
        typed = terms(typeof latest.input === "string" ? latest.input : "")
        ask(data, latest)
      }
    }
  }
}
