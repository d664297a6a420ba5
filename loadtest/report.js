"use strict";
// plotly reads <b> and <a> in names; what a server says is text.
const text = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const grey = "rgba(128, 128, 128, .25)";
const axis = { gridcolor: grey, linecolor: grey, zerolinecolor: grey, automargin: true };
const figures = JSON.parse(document.getElementById("data").textContent);
for (const place of document.querySelectorAll(".plot")) {
  const figure = figures[Number(place.dataset.number)];
  for (const trace of figure.data) {
    trace.name = text(trace.name);
    if (trace.orientation) trace.y = trace.y.map(text);
  }
  const layout = {
    ...figure.layout,
    xaxis: { ...axis, ...figure.layout.xaxis },
    yaxis: { ...axis, rangemode: "tozero", ...figure.layout.yaxis },
    font: { color: "#8a867e", size: 12, family: "inherit" },
    legend: { orientation: "h", y: -0.3, yanchor: "top" },
    margin: { l: 50, r: 10, t: 10, b: 40 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    showlegend: true,
  };
  Plotly.newPlot(place, figure.data, layout, { responsive: true, displayModeBar: false });
}
