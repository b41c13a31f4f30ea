import type { Finding } from "./data";

/** What the rules have found, each with its evidence and what to do. */
export function Findings(props: { findings: Finding[] }) {
  return (
    <ul class="findings">
      {props.findings.map((finding) => (
        <li key={finding.code} class={finding.level}>
          <strong>{finding.title}</strong>: {finding.found}. <span class="quiet">{finding.why}</span> {finding.fix}
        </li>
      ))}
    </ul>
  );
}
