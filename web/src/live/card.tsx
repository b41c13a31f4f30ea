import { useId, useMemo } from "preact/hooks";
import { TimeChart, type Line, type Timeline } from "./chart";
import type { Sample } from "./stream";

/** A line of a card, with the figure that stands above the chart and is its legend at once. */
export interface Shown extends Line {
  /** The figure, where it is not what the line draws: a stacked line draws a sum. */
  value?: (sample: Sample) => number | null | undefined;
  big?: boolean;
}

/** A chart under its figures: those of the moment under the cursor, else of now. */
export function ChartCard(props: {
  title: string;
  hint: string;
  lines: Shown[];
  moment: Sample | null;
  timeline: Timeline;
  axisText: (value: number) => string;
  least: number;
  most?: number;
}) {
  const { lines, moment } = props;
  const id = useId();
  const shown = lines.filter((line) => line.style !== "bound");
  const drawn = useMemo(() => lines.filter((line) => line.style !== "figure"), [lines]);
  return (
    <section class="card live-card" aria-labelledby={id}>
      <h2 id={id}>
        {props.title} <span class="quiet small">{props.hint}</span>
      </h2>
      <dl class="figures">
        {shown.map((line) => (
          <Figure key={line.label} line={line} moment={moment} />
        ))}
      </dl>
      <TimeChart
        label={`${props.title}, last ten minutes: ${drawn.map((line) => line.label).join(", ")}`}
        height={168}
        lines={drawn}
        timeline={props.timeline}
        axisText={props.axisText}
        least={props.least}
        most={props.most}
      />
    </section>
  );
}

export function Figure(props: { line: Shown; moment: Sample | null }) {
  const { line, moment } = props;
  const value = moment === null ? null : (line.value ?? line.read)(moment);
  return (
    <div class={line.big ? "figure big" : "figure"}>
      <dt>
        <Swatch line={line} />
        {line.label}
      </dt>
      <dd>
        {value === null || value === undefined ? (
          <span class="none">–</span>
        ) : (
          <>
            <Amount text={line.text(value)} />
          </>
        )}
      </dd>
    </div>
  );
}

/** A number and, smaller, its unit: `5.6 ms`. */
export function Amount(props: { text: string }) {
  const [value, ...unit] = props.text.split(" ");
  return (
    <>
      {value} {unit.length > 0 && <span class="unit">{unit.join(" ")}</span>}
    </>
  );
}

/** The mark of a line in a legend, in the line's own form. SVG attributes, since the page allows no inline styles. */
export function Swatch(props: { line: Line }) {
  const { color, style } = props.line;
  if (style === "figure") return null;
  return (
    <svg class="swatch" viewBox="0 0 14 10" width="14" height="10" aria-hidden="true">
      {style === "area" ? (
        <rect width="10" height="10" x="2" rx="2" fill={`var(--${color})`} />
      ) : (
        <line x1="0" x2="14" y1="5" y2="5" stroke={`var(--${color})`} stroke-width="2.5" stroke-dasharray={style === "dashed" ? "4 3" : undefined} />
      )}
    </svg>
  );
}
