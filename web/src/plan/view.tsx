import type { About } from "../session";

export function PlanView(props: { server: About; query: URLSearchParams }) {
  return <p>{props.query.toString()}</p>;
}
