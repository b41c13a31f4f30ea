import type { About } from "../session";

export function ChatView(props: { server: About }) {
  return <p>{props.server.model}</p>;
}
