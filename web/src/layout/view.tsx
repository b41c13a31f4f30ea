import type { About } from "../session";

export function LayoutView(props: { server: About; query: URLSearchParams }) {
  return <p>{props.query.toString()}</p>;
}
