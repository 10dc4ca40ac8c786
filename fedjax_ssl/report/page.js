// Draws the page's charts with plotly.
'use strict';
const plots = [...document.querySelectorAll('.plot')];
const hidden = new Set();  // Runs that are switched off.

function look(plot) {
  const state = {};
  plot.data.forEach((trace, i) => {
    if (trace.meta !== undefined) state[i] = !hidden.has(trace.meta);
  });
  const indices = Object.keys(state).map(Number);
  if (indices.length) {
    Plotly.restyle(plot, {visible: indices.map(i => state[i])}, indices);
  }
}

// A scale has no zero if it is logarithmic; then plotly finds its own range.
function scale(axis, log) {
  for (const plot of plots) {
    if (plot.data[0].type === 'heatmap') continue;
    const first = plot.first[axis];
    Plotly.relayout(plot, log
        ? {[axis + '.type']: 'log', [axis + '.autorange']: true}
        : first.range
            ? {[axis + '.type']: first.type || 'linear',
               [axis + '.range']: [...first.range]}
            : {[axis + '.type']: first.type || 'linear',
               [axis + '.autorange']: true});
  }
}

function remember() {
  try {
    sessionStorage.setItem(document.title, JSON.stringify([...hidden]));
  } catch (error) { /* Some browsers keep nothing for files. */ }
}

function recall() {
  try {
    JSON.parse(sessionStorage.getItem(document.title) || '[]')
        .forEach(run => hidden.add(run));
  } catch (error) { /* As above. */ }
}

function box(checked, change) {
  const made = document.createElement('input');
  made.type = 'checkbox';
  made.checked = checked;
  made.addEventListener('change', () => change(made.checked));
  return made;
}

recall();
for (const plot of plots) {
  const made = JSON.parse(plot.querySelector('script').textContent);
  plot.first = JSON.parse(JSON.stringify(made.layout));
  Plotly.newPlot(plot, made.data, made.layout, {
    displaylogo: false, plotlyServerURL: '',
    // Of all buttons those that send nothing anywhere.
    modeBarButtons: [['zoom2d', 'pan2d', 'zoomIn2d', 'zoomOut2d',
                      'resetScale2d', 'toImage']],
  }).then(() => look(plot));
  new ResizeObserver(() => Plotly.Plots.resize(plot)).observe(plot);
}
for (const label of document.querySelectorAll('.key label')) {
  const run = Number(label.dataset.run);
  label.prepend(box(!hidden.has(run), shown => {
    if (shown) hidden.delete(run); else hidden.add(run);
    plots.forEach(look);
    remember();
  }));
}
const switches = document.querySelector('.switches');
if (switches) {
  for (const [name, axis] of [['log x', 'xaxis'], ['log y', 'yaxis']]) {
    const label = document.createElement('label');
    label.append(box(false, log => scale(axis, log)), ' ' + name);
    switches.append(label);
  }
}
