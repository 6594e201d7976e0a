// Pages opened from a disk may not start workers, so there the search's script runs in a hidden frame instead
if (location.protocol === "file:") window.Worker = class {
  constructor(url) {
    const frame = document.createElement("iframe"), outer = this, waiting = []
    frame.hidden = true
    document.documentElement.append(frame)
    const inner = frame.contentWindow
    inner.postMessage = data => setTimeout(() => outer.onmessage && outer.onmessage({ data }))
    this.frame = frame
    this.postMessage = data => waiting.push(data)
    const script = inner.document.createElement("script")
    script.src = new URL(url, location.href)
    script.onerror = e => outer.onerror && outer.onerror(e)
    script.onload = () => {
      this.postMessage = data => setTimeout(() => inner.onmessage && inner.onmessage({ data }))
      waiting.forEach(data => this.postMessage(data))
    }
    inner.document.head.append(script)
  }
  terminate() { this.frame.remove() }
}
