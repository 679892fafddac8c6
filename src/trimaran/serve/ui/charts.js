// The pictures: small web components that draw on a canvas in the page's own colours.

class Chart extends HTMLElement {
  connectedCallback() {
    this.canvas = document.createElement("canvas");
    this.append(this.canvas);
    this.setAttribute("role", "img");
    new ResizeObserver(() => this.draw()).observe(this);
  }

  // What is shown, and the same in words for those who don't see it.
  show(data, words) {
    this.data = data;
    this.setAttribute("aria-label", words);
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this;
    if (!this.data || !width || !height) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    const style = getComputedStyle(this);
    this.paint(pen, width, height, (name) => style.getPropertyValue(`--${name}`).trim());
  }
}

// Rows of each step over time: a bar a step, as wide as the step was long.
class StepChart extends Chart {
  paint(pen, width, height, colour) {
    const { steps, now, seconds } = this.data;
    const bottom = height - 16;
    const most = Math.max(1, ...steps.map((step) => step.prefill_tokens + step.decode_tokens));
    const x = (time) => width * (1 - (now - time) / seconds);
    for (const step of steps) {
      const left = x(step.begin);
      const wide = Math.max(1, x(step.begin + step.seconds) - left - 0.5);
      const decode = (bottom * step.decode_tokens) / most;
      const prefill = (bottom * step.prefill_tokens) / most;
      pen.fillStyle = colour("decode");
      pen.fillRect(left, bottom - decode, wide, decode);
      pen.fillStyle = colour("prefill");
      pen.fillRect(left, bottom - decode - prefill, wide, prefill);
    }
    pen.fillStyle = colour("line");
    pen.fillRect(0, bottom, width, 1);
    pen.fillStyle = colour("faint");
    pen.fillText(`${seconds} s ago`, 0, height - 3);
    pen.textAlign = "right";
    pen.fillText("now", width, height - 3);
    pen.textAlign = "left";
    pen.fillText(`${most} rows`, 2, 10);
  }
}

// The KV cache as a field of cells, each standing for as many blocks.
class BlockMap extends Chart {
  paint(pen, width, height, colour) {
    const { cells, blocks_per_cell: size } = this.data;
    const columns = Math.max(1, Math.ceil(Math.sqrt((cells.length * width) / height)));
    const side = Math.min(width / columns, height / Math.ceil(cells.length / columns));
    cells.forEach(([cached, held, shared], i) => {
      const left = (i % columns) * side;
      const top = Math.floor(i / columns) * side;
      pen.fillStyle = colour("free");
      pen.fillRect(left, top, side - 1, side - 1);
      let at = top + side - 1;
      for (const [count, name] of [[shared, "shared"], [held, "held"], [cached, "cached"]]) {
        const part = ((side - 1) * count) / size;
        pen.fillStyle = colour(name);
        pen.fillRect(left, at - part, side - 1, part);
        at -= part;
      }
    });
  }
}

class TimeHistogram extends Chart {
  paint(pen, width, height, colour) {
    const { bounds, counts } = this.data;
    const bottom = height - 16;
    const most = Math.max(1, ...counts);
    const wide = width / counts.length;
    counts.forEach((count, i) => {
      const tall = ((bottom - 12) * count) / most;
      pen.fillStyle = colour("accent");
      pen.fillRect(i * wide, bottom - tall, wide - 1, tall);
    });
    pen.fillStyle = colour("line");
    pen.fillRect(0, bottom, width, 1);
    pen.fillStyle = colour("faint");
    pen.fillText(duration(bounds[0]), 0, height - 3);
    pen.textAlign = "center";
    const middle = Math.floor(bounds.length / 2);
    pen.fillText(duration(bounds[middle]), (middle + 1) * wide, height - 3);
    pen.textAlign = "right";
    pen.fillText(duration(bounds[bounds.length - 1]), width, height - 3);
    pen.textAlign = "left";
  }
}

export function duration(seconds) {
  return seconds < 1 ? `${+(seconds * 1000).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`;
}

customElements.define("step-chart", StepChart);
customElements.define("block-map", BlockMap);
customElements.define("time-histogram", TimeHistogram);
