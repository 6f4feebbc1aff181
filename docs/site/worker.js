// Pages opened as files may start no worker, which the search is. There, run its script in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.onmessage?.(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = (event) => { this.onerror?.(event); reject(new Error(`${url} cannot be loaded`)); };
        inner.document.head.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.onmessage({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
