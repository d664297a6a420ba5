// A chart of stacked bars, one bar per day.

const HEIGHT = 220;
const MARGIN = { left: 44, right: 14, top: 12, bottom: 26 };
const LABEL_WIDTH = 48; // width of a day's label
const SPACE = "http://www.w3.org/2000/svg";
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** Draw series (`{name, values, className}`, one value per day) into an SVG element. */
export function drawBars(svg, { days, series }) {
  const width = svg.clientWidth;
  if (!width) return; // the chart is hidden
  const [innerWidth, innerHeight] = [width - MARGIN.left - MARGIN.right, HEIGHT - MARGIN.top - MARGIN.bottom];
  const sums = days.map((_, place) => series.reduce((sum, { values }) => sum + values[place], 0));
  const top = roundUp(Math.max(...sums, 0));
  const toY = (value) => MARGIN.top + innerHeight * (1 - value / top);
  const step = innerWidth / days.length;
  const toX = (place) => MARGIN.left + step * place;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const ticks = top % 2 === 1 ? [0, top] : [0, top / 2, top]; // labels are whole numbers
  const marks = ticks.flatMap((value) => [
    make("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: toY(value), y2: toY(value) }),
    make("text", { x: MARGIN.left - 6, y: toY(value) + 4, "text-anchor": "end" }, compact.format(value)),
  ]);
  const every = Math.ceil(LABEL_WIDTH / step);
  const names = days.flatMap((day, place) =>
    (days.length - 1 - place) % every ? [] : [make("text", { x: toX(place) + step / 2, y: HEIGHT - 6, "text-anchor": "middle" }, day.slice(5))],
  );
  const gap = step > 4 ? 1 : 0;
  const below = days.map(() => 0);
  const bars = series.flatMap(({ name, values, className }) =>
    values.flatMap((value, place) => {
      if (!value) return [];
      const y = toY(below[place] + value);
      const bar = make("rect", { class: className, x: toX(place) + gap, y, width: step - 2 * gap, height: Math.max(toY(below[place]) - y, 0.5) });
      below[place] += value;
      bar.append(make("title", {}, `${days[place]}, ${name}: ${value.toLocaleString("en")}`));
      return [bar];
    }),
  );
  svg.replaceChildren(...marks, ...names, ...bars);
}

/** Round up to one of 1, 2, 4, 6, 8, 10, 20 ... */
function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((factor) => factor * power).find((each) => each >= value);
}

function make(name, attributes, text = "") {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}
