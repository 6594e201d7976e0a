// The search's worker lists ten entries at a time, those first that have the words most often, and none that lacks a word. This
// one asks it for all of them; where fewer than three have all words, for those with some, the more of the rare ones the earlier. It
// lists first those whose title, or list of other words, has every word typed; of both guides before what is public; and after all of
// these internals. A message of ours comes before all else if what was typed repeats it, two words at a time, and last if not
{
  const Unordered = window.Worker, internal = 2, message = 3
  const pairs = words => words.slice(1).map((word, i) => ` ${words[i]} ${word} `)
  window.Worker = class {
    constructor(url) {
      const worker = new Unordered(url), asked = []
      let items, terms, names, texts, messages, typed, rarity, quoted, latest, found
      const joined = text => ` ${terms(text).join(" ")} `
      const has = (text, word) => text.includes(` ${word}`)             // or one that begins with it
      const read = ({ config, items: all }) => {
        const separator = new RegExp(config.separator, "u")
        terms = text => text.replace(/<[^>]*>/g, "").normalize("NFKD").toLowerCase().split(separator).filter(Boolean)
        items = all
        names = items.map(item => joined(`${item.title} ${item.words || ""}`))
        texts = items.map((item, id) => `${names[id]}${joined(item.text)}`)
        messages = items.flatMap((item, id) => item.tier === message ? [[id, pairs(terms(item.text))]] : [])
      }
      const type = input => {
        typed = [...new Set(terms(input))]
        rarity = undefined
        const said = joined(input), most = terms(input).length - 1
        quoted = new Map(messages.map(([id, own]) => [id, own.filter(pair => said.includes(pair)).length, own.length])
          .filter(([, n, all]) => n > 2 && 2 * n > Math.min(all, most)))
      }
      // Of an entry: how early it stands, in two numbers
      const place = ({ id }) => {
        const { tier } = items[id]
        if (tier === message) return quoted.has(id) ? [-Infinity, -quoted.get(id)] : [Infinity, 0]
        const lacking = rarity ? [...rarity].filter(([word]) => !has(texts[id], word)) : []
        const inTitle = typed.every(word => has(names[id], word))
        return [lacking.reduce((sum, [, rare]) => sum + rare, 0), (tier === internal ? 20 : tier) + (inTitle ? 0 : 10)]
      }
      const ask = (data, first = []) => {
        asked.push({ data, first, latest })
        worker.postMessage({ type: 2, data })
      }
      // The query for entries with one of the four rarest words, of those that repeated messages have. One that no entry has does not count
      const some = () => {
        const seen = typed.map(word => [word, texts.filter(text => has(text, word)).length]).filter(([, n]) => n)
        rarity = new Map(seen.map(([word, n]) => [word, Math.log(items.length / n)]))
        const said = [...quoted.keys()].map(id => texts[id]).join("")
        const rare = seen.map(([word]) => word).filter(word => !said || has(said, word))
          .sort((a, b) => rarity.get(b) - rarity.get(a)).slice(0, 4)
        const value = (word, i) => ({ type: "value",
          data: { field: "*", value: { type: "prefix", data: word }, range: { start: 0, end: word.length, value: i } } })
        return { ...latest, input: { type: "operator", data: { operator: "or", operands: rare.map(value) } } }
      }
      const show = ({ size = 10, from = 0 }) => {
        const next = from + size < found.items.length ? { size, from: from + size } : undefined
        const pagination = { total: found.items.length, prev: from ? { size, from: from - size } : undefined, next }
        this.onmessage({ data: { type: 3, data: { ...found, pagination, items: found.items.slice(from, from + size) } } })
      }
      worker.onmessage = ({ data }) => {
        if (data.type !== 3) return this.onmessage({ data })
        const query = asked.shift(), { items: more, pagination } = data.data
        if (query.latest !== latest) return                 // more has been typed since
        found = { ...data.data, items: [...query.first, ...more] }
        const { next, total } = pagination
        if (next) return ask({ ...query.data, page: { ...next, size: total } }, more)
        const hits = found.items.filter(({ id }) => items[id].tier !== message)
        if (hits.length < 3 && !rarity && typed.length > 1) return ask(some())
        found.items = found.items.map(item => [...place(item), item])
          .sort(([a, c], [b, d]) => a - b || c - d).map(([, , item]) => item)
        show({})
      }
      worker.onerror = e => this.onerror && this.onerror(e)
      worker.onmessageerror = e => this.onmessageerror && this.onmessageerror(e)
      this.terminate = () => worker.terminate()
      this.postMessage = data => {
        if (data.type === 0) read(data.data)
        if (data.type !== 2) return worker.postMessage(data)
        if (data.data.page) return show(data.data.page)
        latest = data.data
        type(typeof latest.input === "string" ? latest.input : "")
        ask(quoted.size ? some() : latest)
      }
    }
  }
}
