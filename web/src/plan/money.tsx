import type uPlot from "uplot";
import { money, number, percent } from "../format";
import { axis, Chart, token } from "../ui/chart";
import type { Candidate, Cost, Power } from "./types";

/** Rent, reserve or own, against the share of hours in use. */
export function Money(props: { cost: Cost; best: Candidate; paid: string }) {
  const { cost } = props;
  const { rent, reserved, owned } = cost.usd_per_hour;
  const tokens = props.best.tokens_per_s.mid * 3600;
  const perMillion = (hourly: number) => money((hourly / tokens) * 1e6);
  const rows: [string, string | null, number | null][] = [
    ["Rent on demand", rent && `${money(rent[0])} – ${money(rent[2])}`, rent && rent[1]],
    ["Reserve for a year", null, reserved],
    ["Own", cost.purchase_usd === null ? null : `${money(cost.purchase_usd)} to buy`, owned],
  ];
  return (
    <>
      <table class="prices">
        <thead>
          <tr>
            <th scope="col">{props.paid}</th>
            <th scope="col">USD an hour</th>
            <th scope="col">USD per M tokens</th>
          </tr>
        </thead>
        <tbody>
          {rows.map(([name, note, hourly]) => (
            <tr key={name}>
              <th scope="row">
                {name} {note && <span class="quiet">{note}</span>}
              </th>
              <td>{hourly === null ? "no price" : money(hourly)}</td>
              <td>{hourly === null ? "–" : perMillion(hourly)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="break-even">{breakEven(cost)}</p>
      {rent && owned !== null && <Hours rent={rent[1]} reserved={reserved!} owned={owned} />}
      <p class="quiet small">Prices of {cost.prices_as_of.join("; ")}.</p>
    </>
  );
}

/** What the machine draws, and the circuit that carries it. */
export function Draw(props: { power: Power }) {
  const { power } = props;
  const loads = [
    ["sustained", power.sustained],
    ["at the limit", power.limit],
    ["for milliseconds", power.transient],
  ] as const;
  return (
    <>
      <dl class="power">
        {loads.map(([name, watts]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{number(watts / 1000)} kW</dd>
          </div>
        ))}
      </dl>
      <p class="quiet small">{capital(power.hint)}.</p>
    </>
  );
}

function breakEven(cost: Cost): string {
  const share = cost.break_even_utilisation;
  if (share === null) return "No break-even: rent or purchase has no price.";
  return share <= 1 ? `Owning pays from ${percent(share)} of all hours in use.` : "Renting is cheaper at any use.";
}

function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

const SHARES = Array.from({ length: 21 }, (_, index) => index * 5);

function Hours(props: { rent: number; reserved: number; owned: number }) {
  const data = [
    SHARES,
    SHARES.map((share) => (props.rent * share) / 100),
    SHARES.map(() => props.reserved),
    SHARES.map(() => props.owned),
  ] as uPlot.AlignedData;
  return (
    <Chart
      label="Dollars for every hour of the year against the share of hours in use: renting rises, reserving and owning stay."
      height={220}
      data={data}
      options={chartOptions}
    />
  );
}

function chartOptions(): Omit<uPlot.Options, "width" | "height"> {
  const dollars = (_: uPlot, value: number | null) => (value === null || value === undefined ? "–" : money(value));
  const line = (label: string, series: number) => ({
    label,
    stroke: token(`series-${series}`),
    width: 2,
    points: { show: false },
    value: dollars,
  });
  return {
    scales: { x: { time: false }, y: { range: (_, __, high) => [0, high * 1.08] } },
    axes: [axis({ label: "hours in use, %" }), axis({ label: "USD an hour", size: 64 })],
    series: [
      { label: "in use", value: (_, value) => (value === null || value === undefined ? "–" : `${value} %`) },
      line("rent", 2),
      line("reserve", 4),
      line("own", 3),
    ],
  };
}
