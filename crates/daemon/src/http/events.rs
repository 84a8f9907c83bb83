//! Server-sent events of turns and decisions.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use plimsoll_protocol::request::Event;
use tokio::sync::broadcast::error::RecvError;

use super::ApiState;
use super::params::{NoParams, Params};

/// Interval of keep-alive messages of an idle stream.
const ALIVE: Duration = Duration::from_secs(15);

/// Turns and decisions as they happen, beginning with the last turn. A client that is too slow for all of them gets the
/// last turn in place of the events it missed.
#[utoipa::path(get, path = "/v1/events", responses((status = 200, body = Event, content_type = "text/event-stream")))]
pub(super) async fn events(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
) -> Sse<impl Stream<Item = Result<sse::Event, Infallible>>> {
    let news = desk.shared.events.subscribe();
    let stop = desk.stop.clone();
    let begin = (Some(last_turn(&desk)), news, stop, desk);
    let events = stream::unfold(begin, |(first, mut news, mut stop, desk)| async move {
        let event = match first {
            Some(event) => event,
            None => tokio::select! {
                event = news.recv() => match event {
                    Ok(event) => event,
                    Err(RecvError::Lagged(_)) => last_turn(&desk),
                    Err(RecvError::Closed) => return None,
                },
                // The end of the server ends the stream, too.
                _ = stop.wait_for(|stop| *stop) => return None,
            },
        };
        let data = serde_json::to_string(&event).unwrap_or_default();
        let event = sse::Event::default().data(data);
        Some((Ok(event), (None, news, stop, desk)))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE))
}

fn last_turn(desk: &ApiState) -> Event {
    let turn = desk.shared.snapshot().host.turn;
    Event::Turn { turn }
}
