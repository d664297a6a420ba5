// Usage by day: the form, a chart and a table.

import { drawBars } from "./bars.js";
import { element, fillRows } from "./elements.js";

const NUM_DAYS = 28;
const DAY_MS = 86_400_000;
const MAX_SERIES = 6; // named series; further ones are joined into one
const find = (selector) => document.querySelector(selector);

export class UsageView {
  /** `onChoice`: called when the user has chosen another period or grouping. */
  constructor(form, onChoice) {
    this.form = form;
    this.rows = [];
    this.alone = null; // name of the only series to show; null: all
    const { from, to } = form.elements;
    const now = Date.now();
    to.value = toDay(now);
    from.value = toDay(now - (NUM_DAYS - 1) * DAY_MS);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", ({ target }) => {
      from.max = to.value;
      to.min = from.value;
      if (target.name === "measure") this.draw();
      else if (form.reportValidity()) onChoice();
    });
    addEventListener("resize", () => this.draw());
  }

  path() {
    const { from, to, by } = this.form.elements;
    return `v1/usage?${new URLSearchParams({ from: from.value, to: to.value, by: `day,${by.value}` })}`;
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const { from, to, measure, by } = this.form.elements;
    const days = daysOf(from.value, to.value);
    const known = this.rows.filter((row) => row[measure.value] !== null);
    const series = toSeries(known, days, { measure: measure.value, by: by.value });
    const name = measure.selectedOptions[0].text;
    const noneText = this.rows.length ? `No ${name} in these days${measure.value === "cost" ? ": no prices are set" : ""}.` : "No usage in these days.";
    find("#no-usage").textContent = noneText;
    find("#no-usage").hidden = series.length > 0;
    find("#usage").hidden = series.length === 0;
    if (!series.some((each) => each.name === this.alone)) this.alone = null;
    const shown = series.filter((each) => !this.alone || each.name === this.alone);
    this.showLegend(series);
    const told = `${name} by day and ${by.value}, ${from.value} to ${to.value}`;
    find("#chart").ariaLabel = `${told}: ${shown.map((each) => `${each.name} ${format(each.total)}`).join(", ")}. The numbers are in the table below.`;
    drawBars(find("#chart"), { days, series: shown });
    const table = find("#usage table");
    table.caption.textContent = told;
    table.tHead.replaceChildren(element("tr", ...["day", ...series.map((each) => each.name), "total"].map((text) => element("th", text))));
    fillRows(
      table.tBodies[0],
      days.map((day, place) => {
        const values = series.map((each) => each.values[place]);
        return [day, ...values.map(format), format(values.reduce((sum, value) => sum + value, 0))];
      }),
    );
  }

  showLegend(series) {
    const focused = document.activeElement.closest("#legend button")?.value;
    const buttons = series.map((each) => {
      const button = element("button", each.name, " ", element("b", format(each.total)));
      Object.assign(button, { type: "button", className: `quiet ${each.className}`, value: each.name, ariaPressed: String(each.name === this.alone) });
      button.addEventListener("click", () => {
        this.alone = this.alone === each.name ? null : each.name;
        this.draw();
      });
      return button;
    });
    find("#legend").replaceChildren(...buttons.map((button) => element("li", button)));
    buttons.find(({ value }) => value === focused)?.focus();
  }
}

/** The series of each group, largest first: `{name, values, total, className}`. Groups beyond `MAX_SERIES` are joined. */
function toSeries(rows, days, { measure, by }) {
  const places = new Map(days.map((day, place) => [day, place]));
  const found = [...Map.groupBy(rows, (row) => row[by] || "none")].map(([name, own]) => {
    const values = days.map(() => 0);
    for (const row of own) values[places.get(row.day)] += row[measure];
    return { name, values, total: values.reduce((sum, value) => sum + value, 0) };
  });
  const used = found.filter(({ total }) => total > 0).sort((one, other) => other.total - one.total);
  const rest = used.splice(MAX_SERIES);
  if (rest.length) {
    const values = days.map((_, place) => rest.reduce((sum, each) => sum + each.values[place], 0));
    used.push({ name: `${rest.length} more`, values, total: rest.reduce((sum, { total }) => sum + total, 0) });
  }
  return used.map((each, place) => ({ ...each, className: `series-${place}` }));
}

function daysOf(from, to) {
  const days = [];
  for (let at = Date.parse(from); at <= Date.parse(to); at += DAY_MS) days.push(toDay(at));
  return days;
}

function toDay(ms) {
  return new Date(ms).toISOString().slice(0, 10);
}

function format(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: value < 1 ? 3 : 12, maximumFractionDigits: 2 });
}
