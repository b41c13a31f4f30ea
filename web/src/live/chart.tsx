import { useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { axis, Chart, token } from "../ui/chart";
import { columns, roundAbove, type Reading } from "./columns";
import type { Sample } from "./stream";

/** One line of a chart, and how a person reads its value. */
export interface Line {
  label: string;
  color: string;
  read: Reading;
  text: (value: number) => string;
  /** `bound`: one of the two edges of a band. `figure`: told above the chart alone. */
  style?: "line" | "dashed" | "area" | "bound" | "figure";
}

/** What all charts of the view share: the rows they draw, the moment under the cursor. */
export interface Timeline {
  /** How far back it reaches. */
  seconds: number;
  rows: (Sample | number)[];
  outages: [number, number][];
  /** The row under the cursor. */
  onCursor: (index: number | null) => void;
}

const SYNC = "live";
const TIME_STEPS_S = [10, 30, 60, 120, 300, 600, 900];
const AXIS_WIDTH = 54;

const minutes = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
export const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hourCycle: "h23" });

/** Puts the cursor of all charts on a time, once they have drawn what they were given; null takes it away. */
export function pointAt(time: number | null): void {
  queueMicrotask(() => pointNow(time));
}

function pointNow(time: number | null): void {
  for (const chart of uPlot.sync(SYNC).plots)
    chart.setCursor(time === null ? { left: -10, top: -10 } : { left: chart.valToPos(time, "x"), top: 4 });
}

/** Some lines over the time of the view. All such charts have the same time axis and move their cursors together. */
export function TimeChart(props: {
  label: string;
  height: number;
  lines: Line[];
  timeline: Timeline;
  axisText: (value: number) => string;
  /** The axis reaches at least this far. */
  least: number;
  /** The axis reaches at most this far. */
  most?: number;
}) {
  const { lines, timeline } = props;
  const current = useRef(props);
  current.current = props;
  const data = useMemo(() => columns(timeline.rows, lines.map((line) => line.read)), [timeline.rows, lines]);
  const options = () => chartOptions(() => current.current);
  return <Chart label={props.label} height={props.height} data={data} options={options} />;
}

type Props = Parameters<typeof TimeChart>[0];

function chartOptions(props: () => Props): Omit<uPlot.Options, "width" | "height"> {
  const { lines, axisText } = props();
  const bounds = lines.flatMap((line, index) => (line.style === "bound" ? [index + 1] : []));
  return {
    legend: { show: false },
    padding: [8, 18, 0, 0],
    cursor: {
      sync: { key: SYNC, scales: ["x", null] },
      drag: { x: false, y: false },
      points: { size: 7 },
      y: false,
    },
    scales: {
      x: { time: true, range: (_, __, last) => [last - props().timeline.seconds, last] },
      y: { range: (_, __, top) => [0, Math.min(roundAbove(top ?? 0, props().least), props().most ?? Infinity)] },
    },
    axes: [
      axis({ values: timesOf, incrs: TIME_STEPS_S, space: 64, size: 28 }),
      axis({ values: (_, values) => values.map(axisText), size: AXIS_WIDTH, space: 32, ticks: { show: false } }),
    ],
    series: [{}, ...lines.map(seriesOf)],
    bands: bounds.length === 2 ? [{ series: [bounds[1]!, bounds[0]!], fill: `${token("ink-2")}38` }] : [],
    hooks: {
      draw: [(chart) => markClipped(chart, lines)],
      drawClear: [(chart) => shadeOutages(chart, props().timeline.outages)],
      setCursor: [(chart) => props().timeline.onCursor(chart.cursor.idx ?? null)],
    },
  };
}

const timesOf: uPlot.Axis.DynamicValues = (_, times, __, ___, step) =>
  times.map((time) => (step < 60 ? clock : minutes).format(time * 1000));

/** A small arrow at the upper edge for what lies beyond it. */
function markClipped(chart: uPlot, lines: Line[]): void {
  const { ctx, bbox, data } = chart;
  const size = 4 * devicePixelRatio;
  const [times, ...series] = data;
  ctx.save();
  for (const [index, values] of series.entries()) {
    if (lines[index]!.style === "bound") continue;
    ctx.fillStyle = token(lines[index]!.color);
    for (const [at, value] of values.entries()) {
      if (typeof value !== "number" || value <= chart.scales.y!.max! || times[at]! < chart.scales.x!.min!) continue;
      const x = chart.valToPos(times[at]!, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top - size);
      ctx.lineTo(x + size, bbox.top + size / 2);
      ctx.lineTo(x - size, bbox.top + size / 2);
      ctx.fill();
    }
  }
  ctx.restore();
}

function seriesOf(line: Line): uPlot.Series {
  const stroke = token(line.color);
  const base = { label: line.label, spanGaps: false };
  switch (line.style) {
    case "area":
      return { ...base, stroke, width: 1, fill: stroke, points: { show: false } };
    case "dashed":
      return { ...base, stroke, width: 1.5, dash: [6, 4], points: { show: false } };
    case "bound":
      return { ...base, stroke: "transparent", width: 0, points: { show: false } };
    default:
      return { ...base, stroke, width: 1.75, points: { show: false } };
  }
}

function shadeOutages(chart: uPlot, outages: [number, number][]): void {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.fillStyle = token("bad-soft");
  for (const [from, to] of outages) {
    const left = Math.max(chart.valToPos(from, "x", true), bbox.left);
    const right = Math.min(chart.valToPos(to, "x", true), bbox.left + bbox.width);
    if (right > left) ctx.fillRect(left, bbox.top, right - left, bbox.height);
  }
  ctx.restore();
}
