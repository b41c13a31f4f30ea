import type { About } from "../session";

export function LiveView(props: { server: About }) {
  return <p>{props.server.model}</p>;
}
