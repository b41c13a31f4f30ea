import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

/** The colour a token has right now, light or dark. */
export function token(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const dark = matchMedia("(prefers-color-scheme: dark)");

/** A uPlot chart that is as wide as its place, follows light and dark, and takes new data without being built anew.
 *
 * `options` is called when the chart is (re)built; it must depend on nothing that changes with the data.
 */
export function Chart(props: {
  label: string;
  height: number;
  data: uPlot.AlignedData;
  options: () => Omit<uPlot.Options, "width" | "height">;
}) {
  const place = useRef<HTMLDivElement>(null);
  const chart = useRef<uPlot | null>(null);
  const data = useRef(props.data);
  data.current = props.data;

  useEffect(() => {
    const element = place.current!;
    const build = () => {
      chart.current?.destroy();
      const size = { width: Math.max(element.clientWidth, 200), height: props.height };
      chart.current = new uPlot({ ...props.options(), ...size }, data.current, element);
    };
    build();
    const resized = new ResizeObserver(() =>
      chart.current?.setSize({ width: Math.max(element.clientWidth, 200), height: props.height }),
    );
    resized.observe(element);
    dark.addEventListener("change", build);
    return () => {
      resized.disconnect();
      dark.removeEventListener("change", build);
      chart.current?.destroy();
      chart.current = null;
    };
  }, []);

  useEffect(() => chart.current?.setData(props.data), [props.data]);
  return <div class="chart" ref={place} role="img" aria-label={props.label} />;
}

/** An axis in the page's own colours. */
export function axis(more: uPlot.Axis = {}): uPlot.Axis {
  return {
    stroke: token("ink-2"),
    font: `12px ${token("font")}`,
    labelFont: `12px ${token("font")}`,
    grid: { stroke: token("line"), width: 1 },
    ticks: { stroke: token("line"), width: 1 },
    ...more,
  };
}
